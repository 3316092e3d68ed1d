#include "stream.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <thread>
#include <utility>

namespace sim {
namespace {

constexpr int64_t kPoolSize = 32;  // as CUDA's: after so many, `torch.Stream()` begins again

std::atomic<int> max_delay{0};
std::atomic<uint64_t> delay_seed{1};

thread_local int device_of_thread = 0;
thread_local std::array<int64_t, kNumDevices> stream_of_thread{};
thread_local bool is_thread_of_a_stream = false;

// Never destroyed: threads of streams outlive main().
std::map<StreamKey, std::unique_ptr<Stream>>& streams() {
  static auto* all = new std::map<StreamKey, std::unique_ptr<Stream>>;
  return *all;
}

std::map<StreamKey, MomentPtr>& gates() {
  static auto* all = new std::map<StreamKey, MomentPtr>;
  return *all;
}

double now_in_milliseconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(now).count();
}

}  // namespace

std::recursive_mutex& state_mutex() {
  static auto* mutex = new std::recursive_mutex;
  return *mutex;
}

uint64_t Clock::operator[](StreamKey key) const {
  const auto found = launches_.find(key);
  return found == launches_.end() ? 0 : found->second;
}

void Clock::advance(StreamKey key) {
  ++launches_[key];
}

void Clock::merge(const Clock& other) {
  for (const auto& [key, count] : other.launches_) {
    auto& mine = launches_[key];
    mine = std::max(mine, count);
  }
}

void Moment::happen() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    has_happened_ = true;
    milliseconds_ = now_in_milliseconds();
  }
  changed_.notify_all();
}

void Moment::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return has_happened_; });
}

bool Moment::has_happened() {
  std::lock_guard<std::mutex> lock(mutex_);
  return has_happened_;
}

double Moment::milliseconds() {
  std::lock_guard<std::mutex> lock(mutex_);
  return milliseconds_;
}

Stream::Stream(int device, int64_t id)
    : device(device), id(id), key(key_of(device, id)), random_(delay_seed + 77 * key) {
  std::thread([this] { run(); }).detach();
}

void Stream::push(std::function<void()> work) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(work));
  }
  changed_.notify_all();
}

bool Stream::is_idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return queue_.empty() && !is_busy_;
}

void Stream::run() {
  is_thread_of_a_stream = true;
  for (;;) {
    std::function<void()> work;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      is_busy_ = false;
      changed_.wait(lock, [this] { return !queue_.empty(); });
      work = std::move(queue_.front());
      queue_.pop_front();
      is_busy_ = true;
    }
    work();
  }
}

void Stream::dawdle() {
  const int most = max_delay;
  if (!most) return;
  random_ = random_ * 6364136223846793005ull + 1442695040888963407ull;
  std::this_thread::sleep_for(std::chrono::microseconds((random_ >> 33) % most));
}

void set_delay(int microseconds, uint64_t seed) {
  max_delay = microseconds;
  delay_seed = seed;
}

void hold(Stream& stream) {
  StateLock lock(state_mutex());
  auto& gate = gates()[stream.key];
  if (gate) return;
  gate = std::make_shared<Moment>(Clock());
  stream.push([gate] { gate->wait(); });
}

void let_go(Stream& stream) {
  StateLock lock(state_mutex());
  if (const auto gate = std::exchange(gates()[stream.key], nullptr)) gate->happen();
}

StreamKey key_of(int device, int64_t id) {
  return device * 1000 + id;
}

Stream& stream_at(int device, int64_t id) {
  StateLock lock(state_mutex());
  auto& stream = streams()[key_of(device, id)];
  if (!stream) stream = std::make_unique<Stream>(device, id);
  return *stream;
}

std::vector<Stream*> all_streams(int device) {
  StateLock lock(state_mutex());
  std::vector<Stream*> found;
  for (const auto& [key, stream] : streams())
    if (device < 0 || stream->device == device) found.push_back(stream.get());
  return found;
}

int64_t next_pool_id(int device) {
  static std::array<std::atomic<int64_t>, kNumDevices> next{};
  return 1 + next.at(device)++ % kPoolSize;
}

int64_t next_group_id(int device) {
  static std::array<std::atomic<int64_t>, kNumDevices> next{};
  return 1 + kPoolSize + next.at(device)++ % kPoolSize;
}

bool is_on_host() {
  return !is_thread_of_a_stream;
}

int current_device() {
  return device_of_thread;
}

int exchange_device(int device) {
  const int old = device_of_thread;
  if (device >= 0) device_of_thread = device;
  return old;
}

int64_t current_stream_id(int device) {
  return stream_of_thread.at(device);
}

int64_t exchange_stream_id(int device, int64_t id) {
  return std::exchange(stream_of_thread.at(device), id);
}

}  // namespace sim
