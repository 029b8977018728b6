#include "runtime.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>

namespace sim {

thread_local std::string launch_error;

namespace {
thread_local int t_device = 0;
thread_local int t_streams[DEVICES] = {0, 1};  // the default stream of each device has the device's number
constexpr size_t GRAIN = 512;

constexpr size_t ROOM = size_t(1) << 36;  // of addresses, of all devices together; no memory is taken that nobody touches

struct Addresses {
  char *seen, *behind;
  std::atomic<size_t> used{0};
  Addresses() : seen(mapped(PROT_NONE)), behind(mapped(PROT_READ | PROT_WRITE)) {}
  void* take(size_t nbytes) {
    size_t at = used.fetch_add(nbytes);
    TORCH_CHECK_WITH(OutOfMemoryError, at + nbytes <= ROOM, "sim: no addresses are left");
    return seen + at;
  }
  static char* mapped(int protection) {
    void* found = mmap(nullptr, ROOM, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(found != MAP_FAILED, "sim: no room for addresses");
    return static_cast<char*>(found);
  }
};

Addresses& addresses() {
  static Addresses* one = new Addresses();
  return *one;
}

void pause(double us) {
  if (us > 0) std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(us));
}
}  // namespace

void* behind(const void* data) {
  size_t at = static_cast<const char*>(data) - addresses().seen;
  return at <= ROOM ? addresses().behind + at : const_cast<void*>(data);  // what is empty has no address
}

void join(Clock& into, const Clock& other) {
  for (const auto& [stream, seq] : other) into[stream] = std::max(into[stream], seq);
}

// --- streams ---------------------------------------------------------------------------------------------------------
Stream::Stream(int number, int device) : number(number), device(device), thread_([this] { work(); }) { thread_.detach(); }

void Stream::work() {
  while (true) {
    Task task;
    {
      std::unique_lock<std::mutex> guard(lock_);
      changed_.wait(guard, [this] { return !tasks_.empty() && !held_; });
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    try {
      if (!Runtime::get().stuck()) task.run();  // a device that failed runs nothing any more: its memory may be others' by now
    } catch (const std::exception& error) {
      Runtime::get().failed(task.what + ": " + error.what());
    }
    task = {};
    std::lock_guard<std::mutex> guard(lock_);
    ++done_;
    changed_.notify_all();
  }
}

void Stream::enqueue(Task task, const std::vector<Span>& spans) {
  auto& runtime = Runtime::get();
  std::string what = task.what;
  std::lock_guard<std::mutex> order(runtime.lock);
  if (runtime.capture && runtime.capture->streams.count(number)) {
    runtime.capture->tasks.emplace_back(std::move(task), spans);
    return;
  }
  join(clock, runtime.host);
  clock[number] = ++queued;
  runtime.touch(*this, queued, spans, what);
  std::lock_guard<std::mutex> guard(lock_);
  tasks_.push_back(std::move(task));
  changed_.notify_all();
}

void Stream::wait_done(uint64_t seq) {
  std::unique_lock<std::mutex> guard(lock_);
  changed_.wait(guard, [&] { return done_ >= seq; });
}

bool Stream::done(uint64_t seq) {
  std::lock_guard<std::mutex> guard(lock_);
  return done_ >= seq;
}

void Stream::hold(bool held) {
  std::lock_guard<std::mutex> guard(lock_);
  held_ = held;
  changed_.notify_all();
}

// --- the runtime -----------------------------------------------------------------------------------------------------
Runtime& Runtime::get() {
  static Runtime* one = new Runtime();  // never destroyed: streams' threads outlive everything
  return *one;
}

Runtime::Runtime() {
  for (int device = 0; device < DEVICES; ++device) streams_.push_back(std::make_unique<Stream>(device, device));
}

int Runtime::current_device() const { return t_device; }

int Runtime::exchange_device(int device) {
  TORCH_CHECK(device < DEVICES, "sim: no device ", device);
  int before = t_device;
  if (device >= 0) t_device = device;
  return before;
}

void Runtime::context() {
  std::lock_guard<std::mutex> guard(lock);
  contexts.insert(t_device);
}

Stream& Runtime::stream(int number) {
  std::lock_guard<std::mutex> guard(lock);
  return *streams_.at(number);
}
Stream& Runtime::current_stream(int device) { return stream(t_streams[device]); }
Stream& Runtime::default_stream(int device) { return stream(device); }
Stream& Runtime::exchange_stream(int device, int number) {
  int before = t_streams[device];
  t_streams[device] = number;
  return stream(before);
}
Stream& Runtime::new_stream(int device) {
  std::lock_guard<std::mutex> guard(lock);
  streams_.push_back(std::make_unique<Stream>(static_cast<int>(streams_.size()), device));
  return *streams_.back();
}

std::vector<std::pair<Stream*, uint64_t>> Runtime::under_way() {
  std::lock_guard<std::mutex> guard(lock);
  std::vector<std::pair<Stream*, uint64_t>> found;
  for (auto& stream : streams_)
    if (!stream->done(stream->queued)) found.emplace_back(stream.get(), stream->queued);
  return found;
}

void Runtime::synchronize(Stream& stream) {
  asks();
  uint64_t seq;
  Clock known;
  {
    std::lock_guard<std::mutex> guard(lock);
    seq = stream.queued, known = stream.clock;
  }
  stream.wait_done(seq);
  {
    std::lock_guard<std::mutex> guard(lock);
    join(host, known);
  }
  check();
}

void Runtime::synchronize_device(int device) {
  size_t count;
  {
    std::lock_guard<std::mutex> guard(lock);
    count = streams_.size();
  }
  for (size_t number = 0; number < count; ++number)
    if (stream(number).device == device) synchronize(stream(number));
}

bool Runtime::query(Stream& stream) {
  asks();
  check();
  std::lock_guard<std::mutex> guard(lock);
  if (!stream.done(stream.queued)) return false;
  join(host, stream.clock);
  return true;
}

// --- events ----------------------------------------------------------------------------------------------------------
void Runtime::record(Event& event, Stream& stream) {
  check();
  auto at = std::make_shared<std::atomic<double>>(0);
  stream.enqueue({[at] { *at = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count(); },
                  "event"},
                 {});
  std::lock_guard<std::mutex> guard(lock);
  event.at = at;
  bool captured = capture && capture->streams.count(stream.number);
  event.stream = &stream, event.seq = stream.queued, event.clock = stream.clock, event.capture = captured ? capture->serial : 0;
}

void Runtime::block(const Event& event, Stream& stream) {
  check();
  if (event.stream == nullptr) return;
  Stream* source = event.stream;
  uint64_t seq = event.seq;
  {
    std::lock_guard<std::mutex> guard(lock);
    if (capture && event.capture == capture->serial) {
      capture->streams.insert(stream.number);
      return;
    }
    if (capture && capture->streams.count(stream.number)) {
      capture->broken = "a graph cannot wait for what is not in it";
      TORCH_CHECK(false, "sim: ", capture->broken);
    }
    join(stream.clock, event.clock);
  }
  if (source != &stream) stream.enqueue({[source, seq] { source->wait_done(seq); }, "wait"}, {});
}

bool Runtime::query(const Event& event) {
  asks();
  check();
  if (event.stream == nullptr) return true;
  if (!event.stream->done(event.seq)) return false;
  std::lock_guard<std::mutex> guard(lock);
  join(host, event.clock);
  return true;
}

void Runtime::synchronize(const Event& event) {
  asks();
  if (event.stream != nullptr) {
    event.stream->wait_done(event.seq);
    std::lock_guard<std::mutex> guard(lock);
    join(host, event.clock);
  }
  check();
}

// --- memory ----------------------------------------------------------------------------------------------------------
Block* Runtime::allocate(size_t nbytes, int device) {
  bool captured = capturing(current_stream(device));
  captured ? context() : asks();
  check();
  size_t room = (std::max<size_t>(nbytes, 1) + GRAIN - 1) / GRAIN * GRAIN;
  int number = t_streams[device];
  std::lock_guard<std::mutex> guard(lock);
  Device& here = devices[device];
  if (here.allocated + static_cast<int64_t>(room) > memory_limit) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, "sim: out of memory: ", room, " bytes on device ", device);
  }
  auto& free = here.free[{number, room}];
  Block* block = nullptr;
  for (auto at = free.rbegin(); at != free.rend() && !captured; ++at) {
    bool over = std::all_of((*at)->users.begin(), (*at)->users.end(), [](auto& user) { return user.first->done(user.second); });
    if (over) {
      block = *at;
      free.erase(std::next(at).base());
      break;
    }
  }
  if (block == nullptr) {
    block = new Block{addresses().take(room), room, number, device, {}};
    blocks_[block->data] = block;
  }
  block->users.clear();
  block->captured = captured;
  here.allocated += room;
  here.peak = std::max(here.peak, here.allocated);
  return block;
}

void Runtime::release(Block* block) {
  Stream& owner = stream(block->stream);
  if (poison && block->users.empty() && block->captured == capturing(owner)) {
    auto begin = reinterpret_cast<uintptr_t>(block->data);
    void* data = behind(block->data);
    size_t nbytes = block->nbytes;
    owner.enqueue({[data, nbytes] { std::memset(data, 0xDB, nbytes); }, "reuse of freed memory"}, {{begin, begin + nbytes, true}});
  }
  std::lock_guard<std::mutex> guard(lock);
  Device& here = devices[block->device];
  here.allocated -= block->nbytes;
  if (block->captured) return;
  here.free[{block->stream, block->nbytes}].push_back(block);
}

void Runtime::used_on(void* data, Stream& stream) {
  std::lock_guard<std::mutex> guard(lock);
  auto found = blocks_.find(data);
  if (found != blocks_.end() && found->second->stream != stream.number) found->second->users.emplace_back(&stream, stream.queued);
}

void Runtime::register_host(uintptr_t address, size_t nbytes) {
  asks();
  pause(register_us_per_mib * nbytes / (1 << 20));
  std::lock_guard<std::mutex> guard(lock);
  if (registrations_left == 0) {
    launch_error = "sim: an earlier registration of host memory failed";
    TORCH_CHECK(false, "sim: registration of host memory failed");
  }
  if (registrations_left > 0) --registrations_left;
  for (auto& [begin, size] : host_ranges)
    TORCH_CHECK(address + nbytes <= begin || begin + size <= address, "sim: host memory is registered already");
  host_ranges[address] = nbytes;
}

void Runtime::unregister_host(uintptr_t address) {
  asks();
  forget_host(address);
}

void Runtime::forget_host(uintptr_t address) {
  std::lock_guard<std::mutex> guard(lock);
  TORCH_CHECK(host_ranges.erase(address) == 1, "sim: host memory was not registered");
}

bool Runtime::registered(uintptr_t address, size_t nbytes) {
  std::string why;
  {
    std::lock_guard<std::mutex> guard(lock);
    auto next = host_ranges.upper_bound(address);
    if (next == host_ranges.begin()) return false;
    --next;
    size_t left = next->first + next->second > address ? next->first + next->second - address : 0;
    if (left == 0 || left >= nbytes) return left > 0;
  }
  failed("invalid argument: a copy beyond the end of what was registered as one");
  return true;
}

// --- graphs ------------------------------------------------------------------------------------------------------------
void Runtime::capture_begin(Stream& stream, Capture::Mode mode) {
  std::lock_guard<std::mutex> guard(lock);
  TORCH_CHECK(!capture, "sim: a graph is captured already");
  TORCH_CHECK(stream.number >= DEVICES, "sim: the default stream cannot be captured");
  capture = std::make_unique<Capture>(Capture{mode, std::this_thread::get_id(), {stream.number}, ++captures_, {}, ""});
}

Recorded Runtime::capture_end() {
  std::lock_guard<std::mutex> guard(lock);
  TORCH_CHECK(capture, "sim: no graph is captured");
  auto ended = std::move(capture);
  TORCH_CHECK(ended->broken.empty(), "sim: the capture was broken: ", ended->broken);
  return std::move(ended->tasks);
}

bool Runtime::capturing(const Stream& stream) {
  std::lock_guard<std::mutex> guard(lock);
  return capture && capture->streams.count(stream.number);
}

void Runtime::asks() {
  context();
  std::lock_guard<std::mutex> guard(lock);
  if (!capture || capture->mode == Capture::RELAXED) return;
  if (capture->mode == Capture::THREAD_LOCAL && capture->thread != std::this_thread::get_id()) return;
  bool own = capture->thread == std::this_thread::get_id();
  capture->broken = std::string(own ? "it" : "another thread") + " asked for what is not permitted while a graph is captured";
  TORCH_CHECK(false, "sim: ", capture->broken);
}

// --- who touched what --------------------------------------------------------------------------------------------------
void Runtime::overlapping(const Span& span, std::vector<Access*>& found) {
  // Cuts what is known at the span's ends and fills its gaps, so that the found ones are the span exactly.
  auto cut = [this](uintptr_t at) {
    auto next = shadow_.lower_bound(at);
    if (next == shadow_.begin()) return;
    Access& before = std::prev(next)->second;
    if (before.begin < at && at < before.end) {
      Access right = before;
      right.begin = at;
      before.end = at;
      shadow_.emplace(at, std::move(right));
    }
  };
  cut(span.begin), cut(span.end);
  uintptr_t at = span.begin;
  while (at < span.end) {
    auto next = shadow_.lower_bound(at);
    uintptr_t stop = next == shadow_.end() ? span.end : std::min(span.end, next->first);
    if (next == shadow_.end() || next->first > at) {
      next = shadow_.emplace(at, Access{at, stop, 0, 0, "", {}}).first;
    }
    found.push_back(&next->second);
    at = next->second.end;
  }
}

void Runtime::touch(Stream& stream, uint64_t seq, const std::vector<Span>& spans, const std::string& what) {
  auto knows = [&](int other, uint64_t task) {
    auto place = stream.clock.find(other);
    return task == 0 || (place != stream.clock.end() && place->second >= task);
  };
  auto race = [&](const std::string& kind, const std::string& other, int by) {
    if (races_.size() < 100)
      races_.push_back(what + " on stream " + std::to_string(stream.number) + " " + kind + " what " + other + " on stream " +
                       std::to_string(by) + (kind == "writes" ? " reads or writes" : " writes") + ", and nothing orders the two");
  };
  for (const Span& span : spans) {
    std::vector<Access*> found;
    overlapping(span, found);
    for (Access* access : found) {
      if (!knows(access->writer, access->written)) race(span.writes ? "writes" : "reads", access->what, access->writer);
      if (!span.writes) {
        access->readers[stream.number] = {seq, what};
        continue;
      }
      for (auto& [reader, read] : access->readers)
        if (!knows(reader, read.first)) race("writes", read.second, reader);
      access->readers.clear();
      access->writer = stream.number, access->written = seq, access->what = what;
    }
  }
}

void Runtime::host_reads(uintptr_t address, size_t nbytes, const std::string& what) {
  std::lock_guard<std::mutex> guard(lock);
  for (auto& [begin, access] : shadow_) {
    if (access.end <= address || address + nbytes <= begin) continue;
    auto place = host.find(access.writer);
    if (access.written && (place == host.end() || place->second < access.written))
      races_.push_back(what + " reads on the host what " + access.what + " writes, and nothing orders the two");
  }
}

std::vector<std::string> Runtime::races() {
  std::lock_guard<std::mutex> guard(lock);
  return races_;
}

void Runtime::failed(const std::string& why) {
  std::lock_guard<std::mutex> guard(lock);
  if (stuck_.empty()) stuck_ = why;
}

bool Runtime::stuck() {
  std::lock_guard<std::mutex> guard(lock);
  return !stuck_.empty();
}

void Runtime::check() {
  if (!launch_error.empty()) {
    std::string why;
    std::swap(why, launch_error);
    TORCH_CHECK(false, why);
  }
  std::lock_guard<std::mutex> guard(lock);
  TORCH_CHECK(stuck_.empty(), "sim: ", stuck_);
}

void Runtime::reset() {
  {
    std::lock_guard<std::mutex> guard(lock);
    capture.reset();
  }
  for (int device = 0; device < DEVICES; ++device) {
    size_t count;
    {
      std::lock_guard<std::mutex> guard(lock);
      count = streams_.size();
    }
    for (size_t number = 0; number < count; ++number) {
      stream(number).hold(false);
      stream(number).wait_done(stream(number).queued);
    }
  }
  std::lock_guard<std::mutex> guard(lock);
  for (auto& stream : streams_) join(host, stream->clock);
  races_.clear();
  contexts.clear();
  stuck_.clear();
  launch_error.clear();
  kernel_us = copy_us_per_mib = register_us_per_mib = 0;
  registrations_left = copies_left = -1;
  memory_limit = INT64_MAX;
  for (auto& device : devices) device.peak = device.allocated;
}

}  // namespace sim
