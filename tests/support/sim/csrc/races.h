// The race detector: two accesses of the same memory, one of them a write, by two streams of which
// neither waited for the other.
#pragma once

#include <string>
#include <vector>

#include "launch.h"

namespace sim {

struct Access {
  Range range;
  StreamKey stream;
  uint64_t launch;  // its number on that stream
  std::string name;
  std::string where;  // Python's stack, if launches are traced
};

// The accesses of a block of memory that later ones may race with.
class History {
 public:
  // Report what races with an access at `clock`, then remember it.
  void add(const Access& access, const Clock& clock, const std::string& block);
  // Forget what happened before `clock`: the memory was free since.
  void forget(const Clock& clock);

 private:
  std::vector<Access> accesses_;
};

void report_race(const std::string& text);
std::vector<std::string> take_races();

}  // namespace sim
