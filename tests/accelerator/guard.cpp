// What torch asks of a backend beside kernels: devices, streams, events, allocation, random numbers, pinned memory.
#include "runtime.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/GraphImplInterface.h>
#include <ATen/Context.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <cstring>
#include <mutex>

namespace sim {
namespace {

constexpr auto KIND = c10::DeviceType::PrivateUse1;

c10::Stream as_torch(const Stream& stream) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(KIND, stream.device), stream.number);
}
Stream& ours(const c10::Stream& stream) {
  // torch names the default stream of each device 0
  int number = static_cast<int>(stream.id());
  return Runtime::get().stream(number == 0 ? stream.device_index() : number);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {KIND, static_cast<c10::DeviceIndex>(Runtime::get().exchange_device(device.index()))};
  }
  c10::Device getDevice() const override { return {KIND, static_cast<c10::DeviceIndex>(Runtime::get().current_device())}; }
  void setDevice(c10::Device device) const override {  // as CUDA 12 does: whoever makes a device current makes a context there
    Runtime::get().exchange_device(device.index());
    Runtime::get().context();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { Runtime::get().exchange_device(device.index()); }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  c10::Stream getStream(c10::Device device) const override { return as_torch(Runtime::get().current_stream(index(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return as_torch(Runtime::get().default_stream(index(device))); }
  c10::Stream getNewStream(c10::Device device, int) const override { return as_torch(Runtime::get().new_stream(index(device))); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return as_torch(Runtime::get().exchange_stream(stream.device_index(), ours(stream).number));
  }
  bool queryStream(const c10::Stream& stream) const override { return Runtime::get().query(ours(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override { Runtime::get().synchronize(ours(stream)); }
  void synchronizeDevice(const c10::DeviceIndex device) const override { Runtime::get().synchronize_device(device); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event();
    Runtime::get().record(*static_cast<Event*>(*event), ours(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) Runtime::get().block(*static_cast<Event*>(event), ours(stream));
  }
  bool queryEvent(void* event) const override { return event == nullptr || Runtime::get().query(*static_cast<Event*>(event)); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) Runtime::get().synchronize(*static_cast<Event*>(event));
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    return *static_cast<Event*>(to)->at - *static_cast<Event*>(from)->at;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Runtime::get().used_on(data.get(), ours(stream));
  }

 private:
  static int index(c10::Device device) { return device.index() < 0 ? Runtime::get().current_device() : device.index(); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// --- memory ------------------------------------------------------------------------------------------------------------
void release(void* block) {
  if (block != nullptr) Runtime::get().release(static_cast<Block*>(block));
}

struct Memory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    int device = Runtime::get().current_device();
    c10::Device here(KIND, static_cast<c10::DeviceIndex>(device));
    if (nbytes == 0) return {nullptr, nullptr, &release, here};
    Block* block = Runtime::get().allocate(nbytes, device);
    return {block->data, block, &release, here};
  }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    Runtime::get().synchronize_device(Runtime::get().current_device());
    std::memcpy(behind(to), behind(from), nbytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { Runtime::get().used_on(data.get(), ours(stream)); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    std::lock_guard<std::mutex> guard(Runtime::get().lock);
    auto& bytes = stats.allocated_bytes[0];
    bytes.current = Runtime::get().devices[device].allocated, bytes.peak = Runtime::get().devices[device].peak;
    stats.reserved_bytes[0] = bytes;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(Runtime::get().lock);
    Runtime::get().devices[device].peak = Runtime::get().devices[device].allocated;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(Runtime::get().lock);
    size_t all = Runtime::get().memory_limit == INT64_MAX ? size_t(1) << 36 : Runtime::get().memory_limit;
    return {all - Runtime::get().devices[device].allocated, all};
  }
};
Memory memory;
REGISTER_ALLOCATOR(KIND, &memory)

// Pinned memory that was given back while streams were at work. Torch's allocator records an event for each copy, and lets nobody
// else have the memory before that: here all that is queued by then is waited for, by whoever asks for memory next.
struct GivenBack {
  void* data;
  std::vector<std::pair<Stream*, uint64_t>> users;
};
std::mutex given_back_lock;
std::vector<GivenBack> given_back;

void free_what_is_done() {
  std::lock_guard<std::mutex> guard(given_back_lock);
  auto over = [](const GivenBack& one) {
    bool done = std::all_of(one.users.begin(), one.users.end(), [](auto& user) { return user.first->done(user.second); });
    if (done) std::free(one.data);
    return done;
  };
  given_back.erase(std::remove_if(given_back.begin(), given_back.end(), over), given_back.end());
}

struct Pinned final : at::HostAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    free_what_is_done();
    size_t room = (std::max<size_t>(nbytes, 1) + 4095) / 4096 * 4096;
    void* data = std::aligned_alloc(4096, room);
    Runtime::get().register_host(reinterpret_cast<uintptr_t>(data), room);
    return {data, data, &give_back, c10::Device(c10::DeviceType::CPU)};
  }
  static void give_back(void* data) {  // torch's own keeps it for the next one, and asks nothing of a device
    Runtime::get().forget_host(reinterpret_cast<uintptr_t>(data));
    {
      std::lock_guard<std::mutex> guard(given_back_lock);
      given_back.push_back({data, Runtime::get().under_way()});
    }
    free_what_is_done();
  }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
Pinned pinned;
at::HostAllocatorRegistry<KIND> pinned_registered(&pinned);

// --- random numbers ----------------------------------------------------------------------------------------------------
struct Random final : at::CPUGeneratorImpl {
  explicit Random(int device) {
    device_ = c10::Device(KIND, static_cast<c10::DeviceIndex>(device));
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  void setCurrentDevice(c10::DeviceIndex device) const override { Runtime::get().exchange_device(device), Runtime::get().context(); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(Runtime::get().current_device()); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(Runtime::get().exchange_device(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override { return Runtime::get().registered(reinterpret_cast<uintptr_t>(data), 1); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    static at::Generator generators[DEVICES] = {at::make_generator<Random>(0), at::make_generator<Random>(1)};
    return generators[device < 0 ? Runtime::get().current_device() : device];
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return at::make_generator<Random>(device < 0 ? 0 : device); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    c10::DataPtr data = memory.allocate(nbytes);
    if (storage.nbytes()) {  // what had no memory is waited for by nobody
      Runtime::get().synchronize_device(storage.device().index());
      std::memcpy(behind(data.get()), behind(storage.data()), std::min(nbytes, storage.nbytes()));
    }
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(nbytes);
  }
};

// --- graphs ------------------------------------------------------------------------------------------------------------
struct Graph final : at::GraphImplInterface {
  explicit Graph(const at::GraphImplArgs&) {}
  void capture_begin(c10::MempoolId_t, at::GraphCaptureMode mode) override {
    auto& runtime = Runtime::get();
    device_ = runtime.current_device();
    bool relaxed = mode == at::GraphCaptureMode::Relaxed, local = mode == at::GraphCaptureMode::ThreadLocal;
    runtime.capture_begin(runtime.current_stream(runtime.current_device()),
                          relaxed ? Capture::RELAXED : local ? Capture::THREAD_LOCAL : Capture::GLOBAL);
  }
  void capture_end() override { tasks_ = Runtime::get().capture_end(); }
  void instantiate() override {}
  void replay() override {
    Stream& stream = Runtime::get().current_stream(device_);
    Runtime::get().check();
    for (const auto& [task, spans] : tasks_) stream.enqueue(task, spans);
  }
  void reset() override { tasks_.clear(); }
  c10::MempoolId_t pool() const override { return {0, 0}; }
  void enable_debug_mode() override {}
  void debug_dump(const std::string&) override {}

 private:
  Recorded tasks_;
  int device_ = 0;
};

}  // namespace
}  // namespace sim

namespace at {
REGISTER_GRAPH_IMPL(SIM, sim::Graph)
}

namespace sim {
namespace {

struct Register {
  Register() {
    c10::register_privateuse1_backend("sim");
    at::RegisterPrivateUse1HooksInterface(new Hooks());
  }
} registered;

}  // namespace
}  // namespace sim
