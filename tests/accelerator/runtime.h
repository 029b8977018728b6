// A device that is simulated: memory, streams, events and faults. Kernels run later, each stream's in order, on a thread of
// its own; vector clocks tell which accesses nothing orders.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace sim {

constexpr int DEVICES = 2;
constexpr int HOST = -1;  // the host's place in a clock

// A device's memory as its kernels see it. The address that everybody else has is of no use to the host, as on real devices: who
// reads or writes there dies.
void* behind(const void* data);

using Clock = std::map<int, uint64_t>;  // per stream, the newest of its tasks that is known to be over
void join(Clock& into, const Clock& other);

struct Span {
  uintptr_t begin, end;
  bool writes;
};

struct Task {
  std::function<void()> run;
  std::string what;
};

using Recorded = std::vector<std::pair<Task, std::vector<Span>>>;

struct Capture {  // of a graph: what its streams are asked for is recorded, and not done
  enum Mode { GLOBAL, THREAD_LOCAL, RELAXED } mode;
  std::thread::id thread;
  std::set<int> streams;
  uint64_t serial;
  Recorded tasks;
  std::string broken;  // why nothing comes of it
};

class Stream {
 public:
  Stream(int number, int device);
  // Order ``task`` behind what is queued here. ``spans``: the memory that it touches.
  void enqueue(Task task, const std::vector<Span>& spans);
  void synchronize();
  bool idle();
  void wait_done(uint64_t seq);
  bool done(uint64_t seq);
  void hold(bool held);

  const int number, device;
  Clock clock;        // guarded by the runtime's lock
  uint64_t queued = 0;

 private:
  void work();
  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  uint64_t done_ = 0;
  bool held_ = false;
  std::thread thread_;
};

struct Event {
  Stream* stream = nullptr;  // nullptr: never recorded, and so complete
  uint64_t seq = 0;
  uint64_t capture = 0;  // the one that it was recorded in, and not done
  Clock clock;
  std::shared_ptr<std::atomic<double>> at;  // milliseconds, once it has happened
};

struct Block {
  void* data = nullptr;
  size_t nbytes = 0;
  int stream = 0, device = 0;
  bool captured = false;  // a graph's own: nobody else ever gets it
  std::vector<std::pair<Stream*, uint64_t>> users;  // record_stream: reused only after these
};

struct Access {
  uintptr_t begin, end;
  int writer = 0;
  uint64_t written = 0;
  std::string what;
  std::map<int, std::pair<uint64_t, std::string>> readers;
};

class Runtime {
 public:
  static Runtime& get();

  // --- devices and streams
  int current_device() const;
  int exchange_device(int device);
  Stream& current_stream(int device);
  Stream& exchange_stream(int device, int number);
  Stream& new_stream(int device);
  Stream& stream(int number);
  Stream& default_stream(int device);
  std::vector<std::pair<Stream*, uint64_t>> under_way();  // of each stream that is not done, what it was given last
  void synchronize_device(int device);

  // --- events: a host thread that asks learns what the event knows
  void record(Event& event, Stream& stream);
  void block(const Event& event, Stream& stream);
  bool query(const Event& event);
  void synchronize(const Event& event);
  void synchronize(Stream& stream);
  bool query(Stream& stream);

  // --- memory
  Block* allocate(size_t nbytes, int device);
  void release(Block* block);
  void used_on(void* data, Stream& stream);
  void register_host(uintptr_t address, size_t nbytes);
  void unregister_host(uintptr_t address);
  void forget_host(uintptr_t address);
  bool registered(uintptr_t address, size_t nbytes);

  // --- graphs
  void capture_begin(Stream& stream, Capture::Mode mode);
  Recorded capture_end();
  bool capturing(const Stream& stream);
  void asks();  // what nobody may while a graph is captured: it breaks that capture

  // --- what happened
  void touch(Stream& stream, uint64_t seq, const std::vector<Span>& spans, const std::string& what);
  void host_reads(uintptr_t address, size_t nbytes, const std::string& what);
  std::vector<std::string> races();
  void failed(const std::string& why);  // sticks to all later calls
  void check();                         // raises what stuck
  bool stuck();
  void reset();

  // --- the world's unkindness
  double kernel_us = 0, copy_us_per_mib = 0, register_us_per_mib = 0;
  int64_t registrations_left = -1;  // that succeed; -1: all
  int64_t copies_left = -1;
  int64_t memory_limit = INT64_MAX;
  bool poison = true;               // memory that is free is written at once, in its stream's order

  std::mutex lock;
  Clock host;
  std::unique_ptr<Capture> capture;
  struct Device {
    int64_t allocated = 0, peak = 0;
    std::map<std::pair<int, size_t>, std::vector<Block*>> free;
  } devices[DEVICES];
  std::map<uintptr_t, size_t> host_ranges;
  std::set<int> contexts;  // devices that something was asked of, or that were made current by name
  void context();

 private:
  Runtime();
  std::vector<std::unique_ptr<Stream>> streams_;
  std::map<uintptr_t, Access> shadow_;  // by their first byte; they do not overlap
  std::vector<std::string> races_;
  std::string stuck_;
  uint64_t captures_ = 0;
  std::unordered_map<void*, Block*> blocks_;
  void overlapping(const Span& span, std::vector<Access*>& found);
};

thread_local extern std::string launch_error;  // raised by this thread's next launch

}  // namespace sim
