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
  target_link_libraries(mutant_${name} PRIVATE model_checker_parts hvd_order_core)
  set_target_properties(
    mutant_${name} PROPERTIES
    OUTPUT_NAME ${name} RUNTIME_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/mutants/bin)
  add_dependencies(mutants mutant_${name})
endfunction()

# ------------------------------------------------------------------ rank 0
add_mutant(leader_offers_while_one_rank_lacks leader.cc
  [[--models_[slice.model].lacking[slice.index] == 0]]
  [[--models_[slice.model].lacking[slice.index] == 1]])
add_mutant(leader_forgets_offers_when_it_starts_to_hear leader.cc
  [[models_[model].offered[slice] ? -1 : 0]]
  [[0]])
add_mutant(leader_keeps_offers_marked_after_the_issue leader.cc
  [[models_[slice->model].offered[slice->index] = 0;]]
  [[]])
add_mutant(leader_waits_for_a_rank_that_it_no_longer_hears leader.cc
  [[if (peer.ahead[model][slice] <= 0) {]]
  [[if (false) {]])
add_mutant(leader_counts_reports_of_a_rank_that_it_no_longer_hears leader.cc
  [[if (!heard) {]]
  [[if (false) {]])
add_mutant(leader_does_not_wait_for_the_next_report leader.cc
  [[--peer.ahead[slice.model][slice.index] <= 0]]
  [[--peer.ahead[slice.model][slice.index] < 0]])
add_mutant(leader_does_not_wait_for_heard_ranks_in_a_new_model leader.cc
  [[lacking.assign(slices, 1 + heardPeers_)]]
  [[lacking.assign(slices, 1)]])
add_mutant(leader_drops_early_reports leader.cc
  [[early_.push_back({from, slice});]]
  [[]])
add_mutant(leader_answers_after_its_decisions leader.cc
  [[  for (const Rank rank : answers_) {
    out.messages.push_back({rank, {}});
  }
  answers_.clear();
]]
  [[  struct AtTheEnd {
    Decisions& out;
    std::vector<Rank> ranks;
    ~AtTheEnd() {
      for (const Rank rank : ranks) {
        out.messages.push_back({rank, {}});
      }
    }
  };
  const AtTheEnd answers{out, answers_};
  answers_.clear();
]])
add_mutant(leader_forgets_the_last_rank leader.cc
  [[static_cast<std::size_t>(rank) < peers_.size(); ++rank) {
    out]]
  [[static_cast<std::size_t>(rank) + 1 < peers_.size(); ++rank) {
    out]])

# ------------------------------------------------------------------ the other ranks
add_mutant(follower_takes_what_is_ready_first follower.cc
  [[  while (!decided_.empty() && scheduler_.take(decided_.front())) {
    out.issue.push_back(decided_.front());
    decided_.pop_front();
]]
  [[  const auto ready = [this](SliceKey slice) { return scheduler_.take(slice); };
  for (auto at = std::ranges::find_if(decided_, ready); at != decided_.end();
       at = std::ranges::find_if(decided_, ready)) {
    out.issue.push_back(*at);
    decided_.erase(at);
]])
add_mutant(follower_reports_twice follower.cc
  [[    out.messages.push_back({0, unreported_});
]]
  [[    out.messages.push_back({0, unreported_});
    out.messages.push_back({0, unreported_});
]])
add_mutant(follower_reports_what_was_decided_before_the_answer follower.cc
  [[decidedUnheard_ = decided_.size();]]
  [[decidedUnheard_ = 0;]])
add_mutant(follower_reports_only_what_becomes_ready_after_the_answer follower.cc
  [[unreported_ = undecided_;]]
  [[]])
add_mutant(follower_counts_issued_slices_as_decided_unheard follower.cc
  [[decidedUnheard_ -= decidedUnheard_ > 0 ? 1 : 0;]]
  [[]])
add_mutant(follower_keeps_decided_slices_as_undecided follower.cc
  [[undecided_.erase(std::next(place).base());]]
  [[]])
add_mutant(follower_sleeps_although_it_reports follower.cc
  [[return !decided_.empty() || reports_;]]
  [[return !decided_.empty();]])

# ------------------------------------------------------------------ credit, plan, slices
add_mutant(credit_is_exceeded_by_a_slice scheduler.cc
  [[inFlightBytes_ + size > creditBytes_]]
  [[inFlightBytes_ > creditBytes_]])
add_mutant(credit_is_not_returned scheduler.cc
  [[inFlightBytes_ -= m.layout->slices()[slice.index].sizeBytes;]]
  [[]])
add_mutant(plan_does_not_begin_again scheduler.cc
  [[(m.planned + 1) % m.plan.size()]]
  [[std::min(m.planned + 1, m.plan.size() - 1)]])
add_mutant(fused_slice_waits_for_one_tensor scheduler.cc
  [[m.tensorsToCome[slice.index] = static_cast<std::uint32_t>(tensors.size());]]
  [[m.tensorsToCome[slice.index] = 1;]])
add_mutant(unknown_model_is_taken_for_a_known_one scheduler.cc
  [[return hasModel(slice.model) && isReady(slice) && putInFlight(slice);]]
  [[return isReady(slice) && putInFlight(slice);]])
add_mutant(reservation_is_ignored scheduler.cc
  [[layout(slice.model).slices()[slice.index].sizeBytes > largestBytes_ || ]]
  [[]])

# ------------------------------------------------------------------ what the checker itself needs
add_mutant(state_lacks_undecided_slices follower.cc
  [[  appendSlices(words, undecided_);
]]
  [[]])
add_mutant(state_lacks_the_slice_that_holds_up follower.cc
  [[heldUpBy_ && !alwaysReports_ ? 1 + std::uint64_t{heldUpBy_->word()} : 0]]
  [[0]])
