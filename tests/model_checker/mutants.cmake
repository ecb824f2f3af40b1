# Broken rules that the model checker must find: one program each, built by target `mutants`.
#
# Each is the checker with one source of csrc/scheduler changed in one place. The production code
# holds no switch: the changed copy is compiled into the program and so takes the place of the
# library's. If the text to change no longer occurs exactly once, that program does not compile.
add_library(model_checker_parts OBJECT EXCLUDE_FROM_ALL ${checker_sources})
target_link_libraries(model_checker_parts PRIVATE hvd_order_core)
add_custom_target(mutants)

function(add_mutant name file old new)
  set(source ${CMAKE_CURRENT_SOURCE_DIR}/csrc/scheduler/${file})
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${source})
  file(READ ${source} text)
  string(FIND "${text}" "${old}" first)
  string(FIND "${text}" "${old}" last REVERSE)
  if(first EQUAL -1 OR NOT first EQUAL last)
    message(AUTHOR_WARNING "mutant ${name}: its text must occur once in ${file}")
    set(text "#error mutant ${name}: its text must occur once in ${file}\n")
  else()
    string(REPLACE "${old}" "${new}" text "${text}")
  endif()
  set(mutant ${CMAKE_CURRENT_BINARY_DIR}/mutants/${name}.cc)
  file(CONFIGURE OUTPUT ${mutant} CONTENT "${text}" @ONLY)
  add_executable(mutant_${name} EXCLUDE_FROM_ALL ${mutant})
  target_compile_options(mutant_${name} PRIVATE -w) # what a mutant drops leaves names unused
  target_link_libraries(mutant_${name} PRIVATE model_checker_parts hvd_order_core)
  set_target_properties(
    mutant_${name} PROPERTIES
    OUTPUT_NAME ${name} RUNTIME_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/mutants/bin)
  add_dependencies(mutants mutant_${name})
endfunction()

# ------------------------------------------------------------------ rank 0
add_mutant(leader_offers_again leader.cc
  [[  complete_.clear();
]]
  [[]])
add_mutant(leader_answers_after_its_decisions leader.cc
  [[  subtree_.takeMessages(out.messages);
  if (!mayDecide()) {]]
  [[  struct AtTheEnd {
    Decisions& out;
    std::vector<SliceMessage> messages;
    ~AtTheEnd() {
      out.messages.insert(out.messages.end(), messages.begin(), messages.end());
    }
  };
  AtTheEnd answers{out, {}};
  subtree_.takeMessages(answers.messages);
  if (!mayDecide()) {]])

# ------------------------------------------------------------------ every rank that has children
add_mutant(subtree_does_not_wait_for_its_children subtree.cc
  [[least = std::min(least, grownAt(child.reported, slice));]]
  [[]])
add_mutant(subtree_counts_a_round_too_many_when_it_starts_to_hear subtree.cc
  [[return c.decided;]]
  [[return c.decided + 1;]])
add_mutant(subtree_counts_a_decided_round_as_lacking_when_it_starts_to_hear subtree.cc
  [[return c.decided;]]
  [[return c.decided - (c.decided > 0 ? 1 : 0);]])
add_mutant(subtree_waits_for_a_child_that_it_no_longer_hears subtree.cc
  [[      report({model, slice}, complete);
]]
  [[]])
add_mutant(subtree_drops_reports_of_unknown_models subtree.cc
  [[    ++grownAt(sender.reported, slice);
]]
  [[    if (slice.model < counts_.size()) {
      ++grownAt(sender.reported, slice);
    }
]])
add_mutant(subtree_forgets_the_last_child subtree.cc
  [[place_.isChild(child); ++child) {
    messages_]]
  [[place_.isChild(child + 1); ++child) {
    messages_]])

# ------------------------------------------------------------------ the other ranks
add_mutant(follower_takes_what_is_ready_first follower.cc
  [[  while (!decided_.empty() && scheduler_.take(decided_.front())) {
    out.issue.push_back(decided_.front());
    decided_.pop_front();
  }
]]
  [[  const auto ready = [this](SliceKey slice) { return scheduler_.take(slice); };
  for (auto at = std::ranges::find_if(decided_, ready); at != decided_.end();
       at = std::ranges::find_if(decided_, ready)) {
    out.issue.push_back(*at);
    decided_.erase(at);
  }
]])
add_mutant(follower_does_not_pass_decisions_on follower.cc
  [[  subtree_.decided(slices);
]]
  [[]])
add_mutant(follower_reports_twice follower.cc
  [[    out.messages.push_back({parent, unreported_});
]]
  [[    out.messages.push_back({parent, unreported_});
    out.messages.push_back({parent, unreported_});
]])
add_mutant(follower_reports_what_was_decided_before_the_answer subtree.cc
  [[counts.reported = counts.decided;]]
  [[counts.reported = 0;]])
add_mutant(follower_reports_only_what_becomes_ready_after_the_answer follower.cc
  [[startReports(undecided_, unreported_)]]
  [[startReports({}, unreported_)]])
add_mutant(follower_sleeps_although_it_reports follower.cc
  [[!decided_.empty() || subtree_.reports() ||]]
  [[!decided_.empty() ||]])

# ------------------------------------------------------------------ credit, plan, slices
add_mutant(credit_is_exceeded_by_a_slice scheduler.cc
  [[inFlightBytes_ + size > creditBytes_]]
  [[inFlightBytes_ > creditBytes_]])
add_mutant(credit_is_not_returned scheduler.cc
  [[inFlightBytes_ -= m.layout->creditBytes(slice.index);]]
  [[]])
add_mutant(plan_does_not_begin_again scheduler.cc
  [[(m.planned + 1) % m.plan.size()]]
  [[std::min(m.planned + 1, m.plan.size() - 1)]])
add_mutant(fused_slice_waits_for_one_tensor scheduler.cc
  [[slice == SliceLayout::kSquares ? tensors + layout.pairs() : tensors;]]
  [[slice == SliceLayout::kSquares ? tensors + layout.pairs() : 1;]])
add_mutant(squares_do_not_wait_for_the_sums scheduler.cc
  [[slice == SliceLayout::kSquares ? tensors + layout.pairs() : tensors;]]
  [[slice == SliceLayout::kSquares ? tensors : tensors;]])
add_mutant(squares_wait_for_the_sums_of_the_first_step_alone scheduler.cc
  [[  m.toCome[slice.index] = prerequisites(*m.layout, slice.index);
]]
  [[  m.toCome[slice.index] = slice.index == 0 ? 1 : prerequisites(*m.layout, slice.index);
]])
add_mutant(gather_does_not_wait_for_the_sum scheduler.cc
  [[    if (waitsForTensors(*m.layout, slice)) {
      count(m, {tensor.model, slice});
    }
]]
  [[    if (m.state[slice] == SlicePhase::kWaiting && m.toCome[slice] > 0) {
      count(m, {tensor.model, slice});
    }
]])
add_mutant(gather_waits_for_the_sum_of_another scheduler.cc
  [[m.layout->gatherOf(slice.index)}]]
  [[m.layout->gatherOf(m.layout->pairs() + 1 - slice.index)}]])
add_mutant(gather_is_never_released scheduler.cc
  [[    count(m, {slice.model, m.layout->gatherOf(slice.index)});
]]
  [[]])
add_mutant(released_gather_is_not_passed_on agreement.cc
  [[    sliceReady(next);
]]
  [[    (void)next;
]])
add_mutant(sum_completes_its_tensor scheduler.cc
  [[  for (const TensorId tensor : tensors) {
    if (--m.slicesToGo[tensor] == 0) {]]
  [[  for (const TensorId tensor : tensors) {
    m.slicesToGo[tensor] -= m.layout->slices()[slice.index].operation == Operation::kReduceScatter;
    if (--m.slicesToGo[tensor] == 0) {]])
add_mutant(unknown_model_is_taken_for_a_known_one scheduler.cc
  [[return hasModel(slice.model) && isReady(slice) && putInFlight(slice);]]
  [[return isReady(slice) && putInFlight(slice);]])
add_mutant(reservation_is_ignored scheduler.cc
  [[layout(slice.model).creditBytes(slice.index) > largestBytes_ || ]]
  [[]])

# ------------------------------------------------------------------ from a plan to a leader
add_mutant(plan_goes_on_after_it_is_held planned.cc
  [[  while (issued_ < limit_) {]]
  [[  while (issued_ < limit_ || !ending_) {]])
add_mutant(plan_ends_where_this_rank_has_come planned.cc
  [[  limit_ = issued;
]]
  [[  limit_ = issued_;
]])
add_mutant(successor_forgets_ready_slices agreement.cc
  [[        sliceReady({model, slice});
]]
  [[]])
add_mutant(successor_waits_for_an_event agreement_sequence.cc
  [[  if (changeIfPlanHasEnded()) {
    current_->decide(out);
  }
]]
  [[  changeIfPlanHasEnded();
]])
add_mutant(early_messages_are_dropped agreement_sequence.cc
  [[    earlyMessages_.push_back({from, number, {slices.begin(), slices.end()}});
]]
  [[]])
add_mutant(messages_of_the_next_agreement_do_not_wait agreement_sequence.cc
  [[  if (number == number_) {]]
  [[  if (number >= number_) {]])

# ------------------------------------------------------------------ what the checker itself needs
add_mutant(state_lacks_undecided_slices follower.cc
  [[  appendSlices(words, undecided_);
]]
  [[]])
add_mutant(state_lacks_the_slice_that_holds_up follower.cc
  [[heldUpBy_ && !alwaysReports_ ? 1 + std::uint64_t{heldUpBy_->word()} : 0]]
  [[0]])
