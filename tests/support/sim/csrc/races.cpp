#include "races.h"

#include <algorithm>
#include <set>
#include <sstream>

namespace sim {
namespace {

constexpr size_t kMostReports = 1000;

struct Reports {
  std::vector<std::string> texts;
  std::set<std::string> known;
};
Reports& reports() {
  static auto* all = new Reports;
  return *all;
}

std::string name_of(StreamKey key) {
  return "stream " + std::to_string(key % 1000) + " of device " + std::to_string(key / 1000);
}

bool overlap(const Range& a, const Range& b) {
  return a.begin < b.end && b.begin < a.end;
}

}  // namespace

void History::add(const Access& access, const Clock& clock, const std::string& block) {
  const auto& range = access.range;
  for (const auto& earlier : accesses_) {
    const bool is_ordered =
        earlier.stream == access.stream || clock[earlier.stream] >= earlier.launch;
    if (is_ordered || !overlap(earlier.range, range)) continue;
    if (!earlier.range.is_written && !range.is_written) continue;
    std::ostringstream text;
    text << access.name << (range.is_written ? " writes" : " reads") << " on "
         << name_of(access.stream) << " what " << earlier.name
         << (earlier.range.is_written ? " wrote" : " read") << " on " << name_of(earlier.stream)
         << ", and neither waits for the other (" << block << ")";
    if (!access.where.empty() || !earlier.where.empty())
      text << "\nthe one:\n" << access.where << "the other:\n" << earlier.where;
    report_race(text.str());
  }
  // Whoever races with an access that this one covers races with this one, too.
  const auto is_covered = [&](const Access& earlier) {
    return range.begin <= earlier.range.begin && earlier.range.end <= range.end &&
        clock[earlier.stream] >= earlier.launch && (range.is_written || !earlier.range.is_written);
  };
  accesses_.erase(std::remove_if(accesses_.begin(), accesses_.end(), is_covered), accesses_.end());
  accesses_.push_back(access);
}

void History::forget(const Clock& clock) {
  const auto is_over = [&](const Access& access) { return clock[access.stream] >= access.launch; };
  accesses_.erase(std::remove_if(accesses_.begin(), accesses_.end(), is_over), accesses_.end());
}

void report_race(const std::string& text) {
  StateLock lock(state_mutex());
  auto& [texts, known] = reports();
  if (texts.size() < kMostReports && known.insert(text).second) texts.push_back(text);
}

std::vector<std::string> take_races() {
  StateLock lock(state_mutex());
  reports().known.clear();
  return std::move(reports().texts);
}

}  // namespace sim
