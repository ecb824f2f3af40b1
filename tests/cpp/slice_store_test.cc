#include "servers/slice/slice_store.h"

#include "base/error.h"
#include "server_world.h"

namespace hvd_order {

namespace {

using test::floatsOf;
using test::payloadOf;

const SliceShape kUpdates{8, ElementType::kFloat32, {{0, 2, 0}}};

RuleBook book(std::vector<std::pair<Round, double>> rates) { // since, learning rate
  RuleBook rules;
  for (const auto& [since, lr] : rates) {
    const auto number = static_cast<RulesNumber>(rules.size() + 1);
    rules[number] = {
        since, std::make_shared<const Rules>(Rules{{.kind = RuleKind::kSgd, .lr = lr}})};
  }
  return rules;
}

Payload of(float a, float b) {
  return payloadOf(std::vector<float>{a, b});
}

} // namespace

TEST(anAnswerUnderWayKeepsItsValue) {
  SliceStore slice(kUpdates, true, Consistency::kSynchronous, 1);
  slice.begin(of(5, 5));
  const Payload underWay = slice.state().value;
  slice.push(0, 1, of(1, 1));
  CHECK(slice.advance(book({{1, 1.0}}), false).has_value());
  CHECK_EQUAL(floatsOf(underWay), std::vector<float>{5, 5});
  CHECK_EQUAL(floatsOf(slice.state().value), std::vector<float>{4, 4});
}

} // namespace hvd_order
