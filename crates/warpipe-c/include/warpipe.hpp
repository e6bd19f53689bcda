// warpipe for C++17: warpipe.h with objects that close themselves and errors that are thrown. Header
// only; link with libwarpipe.
//
//   warpipe::Device device("host");
//   warpipe::Stream stream(device);
//   warpipe::PublisherOptions options;
//   options.device = device.get();
//   warpipe::Publisher publisher("camera", options);
//   warpipe::Loan frame = publisher.loan(warpipe::Layout::contiguous(WARPIPE_UINT8, {720, 1280, 3}));
//   fill<<<..., static_cast<cudaStream_t>(stream.get())>>>(frame.data<uint8_t>());
//   frame.send(stream);
//
// Every call throws warpipe::Error, or one of its subclasses, where the C function returns another
// status than WARPIPE_OK. Objects are moved, not copied; a moved-from object is empty, as is one that
// a call has closed. Their destructors ignore errors: call finish(), release() and the like to see
// them. Ownership, threads and streams are as warpipe.h says. Whatever takes a stream takes a
// warpipe::Stream, a CUstream or a cudaStream_t.
//
// License: MIT OR Apache-2.0

#ifndef WARPIPE_HPP
#define WARPIPE_HPP

#if __cplusplus < 201703L
#error "warpipe.hpp needs C++17 (-std=c++17); warpipe.h is for older standards"
#elif !defined(__cpp_exceptions)
#error "warpipe.hpp throws its errors: compile with -fexceptions, or use warpipe.h"
#else

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <memory>
#include <optional>
#include <ratio>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "warpipe.h"

namespace warpipe {

// Times of calls: any std::chrono::duration of a whole number. Negative ones count as 0, and those
// beyond 292 years, such as std::chrono::hours::max(), as the longest one.
class Duration : public std::chrono::nanoseconds {
public:
  constexpr Duration() noexcept : std::chrono::nanoseconds(0) {}
  template <class Rep, class Period,
            class = std::enable_if_t<std::is_integral_v<Rep> &&
                                     std::ratio_divide<Period, std::nano>::den == 1>>
  constexpr Duration(const std::chrono::duration<Rep, Period> &time) noexcept
      : std::chrono::nanoseconds(
            limited<std::ratio_divide<Period, std::nano>::num>(time.count())) {}

private:
  template <std::intmax_t Each, class Rep>
  static constexpr std::int64_t limited(Rep count) noexcept {
    if (count <= 0)
      return 0;
    constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
    const auto positive = static_cast<std::uintmax_t>(count);
    return positive > static_cast<std::uintmax_t>(most / Each)
               ? most
               : static_cast<std::int64_t>(positive) * Each;
  }
};

// As a timeout: the one of the endpoint's options, or of its policy.
inline constexpr Duration usual_timeout{std::chrono::nanoseconds(WARPIPE_USUAL_TIMEOUT)};

inline std::uint64_t nanoseconds(Duration duration) {
  return duration.count() < 0 ? 0 : static_cast<std::uint64_t>(duration.count());
}

// A call that failed: what() has the fact and the next step.
class Error : public std::runtime_error {
public:
  Error(warpipe_status status, const char *message)
      : std::runtime_error(message), status_(status), driver_code_(warpipe_error_driver_code()),
        peer_pid_(warpipe_error_peer_pid()), peer_closed_(warpipe_error_peer_closed()) {}
  // Of no call: it has neither a driver's code nor a peer.
  Error(warpipe_status status, const std::string &message)
      : std::runtime_error(message), status_(status) {}

  warpipe_status status() const noexcept { return status_; }
  // The driver's code (CUresult); 0 if the error came from elsewhere.
  std::int32_t driver_code() const noexcept { return driver_code_; }
  // The process of a peer that is gone; 0 for other errors.
  std::int32_t peer_pid() const noexcept { return peer_pid_; }
  // Whether a peer that is gone had closed; else it died.
  bool peer_closed() const noexcept { return peer_closed_; }

private:
  warpipe_status status_;
  std::int32_t driver_code_ = 0;
  std::int32_t peer_pid_ = 0;
  bool peer_closed_ = false;
};

// WARPIPE_TIMEOUT: wait again, or look at the peer's state.
class Timeout : public Error {
public:
  using Error::Error;
};

// WARPIPE_PEER_GONE: open the endpoint again when the peer is back.
class PeerGone : public Error {
public:
  using Error::Error;
};

// WARPIPE_DATA_LOST: discard what was computed from the data.
class DataLost : public Error {
public:
  using Error::Error;
};

// WARPIPE_NOT_FOUND: nothing has this name now.
class NotFound : public Error {
public:
  using Error::Error;
};

// WARPIPE_LIMIT_REACHED: release something, wait, or raise the limit.
class LimitReached : public Error {
public:
  using Error::Error;
};

// Throws unless the call succeeded.
inline void check(warpipe_status status) {
  switch (status) {
  case WARPIPE_OK:
    return;
  case WARPIPE_TIMEOUT:
    throw Timeout(status, warpipe_error_message());
  case WARPIPE_PEER_GONE:
    throw PeerGone(status, warpipe_error_message());
  case WARPIPE_DATA_LOST:
    throw DataLost(status, warpipe_error_message());
  case WARPIPE_NOT_FOUND:
    throw NotFound(status, warpipe_error_message());
  case WARPIPE_LIMIT_REACHED:
    throw LimitReached(status, warpipe_error_message());
  default:
    throw Error(status, warpipe_error_message());
  }
}

// Throws if the library is not one for this header.
inline void check_version() {
  check(warpipe_check_version(WARPIPE_VERSION_MAJOR, WARPIPE_VERSION_MINOR));
}

namespace detail {
// The same tensor for consumers of DLPack before 1.0.
inline DLManagedTensor *legacy(DLManagedTensorVersioned *tensor) {
  DLManagedTensor *same = nullptr;
  check(warpipe_dlpack_to_legacy(tensor, &same));
  return same;
}

// Elements that are copied as bytes.
template <class T>
constexpr bool is_plain = std::is_trivially_copyable_v<T> && !std::is_same_v<T, bool>;
} // namespace detail

// Elements that something else owns.
template <class T> class View {
public:
  View(T *data, std::size_t size) : data_(data), size_(size) {}

  T *data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }
  bool empty() const noexcept { return size_ == 0; }
  T &operator[](std::size_t index) const { return data_[index]; }
  T *begin() const noexcept { return data_; }
  T *end() const noexcept { return data_ + size_; }

private:
  T *data_;
  std::size_t size_;
};

// Options of a call: a structure of warpipe.h with its size set, and every other field 0, the
// default.
template <class T> struct Options : T {
  Options() : T{} { this->size = sizeof(T); }
};

using PublisherOptions = Options<warpipe_publisher_options>;
using SubscriberOptions = Options<warpipe_subscriber_options>;
using QueueOptions = Options<warpipe_queue_options>;
using WorkerOptions = Options<warpipe_worker_options>;
using ClientOptions = Options<warpipe_client_options>;
using ServerOptions = Options<warpipe_server_options>;
using PublishOptions = Options<warpipe_publish_options>;
using PoolOptions = Options<warpipe_pool_options>;
using OpenOptions = Options<warpipe_open_options>;
using CreateOptions = Options<warpipe_create_options>;
using MemberOptions = Options<warpipe_member_options>;
using MembersOptions = Options<warpipe_members_options>;

// An object of warpipe.h, closed when this is destroyed.
template <class T> class Object {
public:
  Object() noexcept = default;
  // Takes over an object.
  explicit Object(T *object) noexcept : object_(object) {}
  Object(Object &&other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Object &operator=(Object &&other) noexcept {
    if (this != &other) {
      reset();
      object_ = std::exchange(other.object_, nullptr);
    }
    return *this;
  }
  Object(const Object &) = delete;
  Object &operator=(const Object &) = delete;
  ~Object() { reset(); }

  // For functions of warpipe.h.
  T *get() const noexcept { return object_; }
  // The same, for those that take null for a default: an empty object is none.
  T *opened() const {
    if (object_ == nullptr)
      throw Error(WARPIPE_INVALID_OBJECT,
                  std::string("an empty object was passed; pass one that was not moved from, "
                              "closed or sent"));
    return object_;
  }
  // Gives the object up, to be closed by the caller.
  T *release_handle() noexcept { return std::exchange(object_, nullptr); }
  explicit operator bool() const noexcept { return object_ != nullptr; }

  // Closes it, and throws what the destructor would ignore.
  void close() { closed(warpipe_close(get())); }

protected:
  T **place() noexcept { return &object_; }

  // After a call that has closed the object.
  void forget() noexcept { object_ = nullptr; }
  // After a call that closes the object whatever its result, unless another thread was in a call on
  // it, or there was no room for a receipt: then it stays this one's.
  void closed(warpipe_status status) {
    if (status != WARPIPE_INVALID_STATE && status != WARPIPE_LIMIT_REACHED)
      forget();
    check(status);
  }

private:
  void reset() noexcept {
    if (object_ != nullptr)
      static_cast<void>(warpipe_close(release_handle()));
  }

  T *object_ = nullptr;
};

// A directory of names.
class Domain : public Object<warpipe_domain> {
public:
  // The environment's.
  Domain() { check(warpipe_domain_open(nullptr, place())); }
  explicit Domain(const std::string &path) { check(warpipe_domain_open(path.c_str(), place())); }

  // Another user's, with endpoints that may admit this one.
  static Domain of_user(const std::string &path, std::uint32_t owner_uid) {
    warpipe_domain *domain = nullptr;
    check(warpipe_domain_open_of_user(path.c_str(), owner_uid, &domain));
    return Domain(domain);
  }

  // The endpoints of living and of dead processes, sorted by name.
  std::vector<warpipe_endpoint> endpoints() const {
    std::vector<warpipe_endpoint> found(16);
    for (;;) {
      std::size_t count = 0;
      check(warpipe_domain_list(get(), found.data(), found.size(), &count));
      const bool all = count <= found.size();
      found.resize(count);
      if (all)
        return found;
    }
  }

private:
  explicit Domain(warpipe_domain *domain) : Object(domain) {}
};

// A GPU, or the host.
class Device : public Object<warpipe_device> {
public:
  // The first GPU if there is one, else the host.
  Device() {
    check_version();
    check(warpipe_device_open(nullptr, place()));
  }
  // "host", "cuda", "cuda:1", "GPU-...".
  explicit Device(const std::string &name) {
    check_version();
    check(warpipe_device_open(name.c_str(), place()));
  }

  warpipe_device_info info() const {
    warpipe_device_info info;
    check(warpipe_device_get_info(get(), &info));
    return info;
  }

  bool is_cuda() const { return info().is_cuda; }
};

// A stream of this library. It must outlive what is received, sent or used with it, and be destroyed
// before its device.
class Stream {
public:
  explicit Stream(const Device &device) : device_(device.get()) {
    check(warpipe_stream_create(device_, &stream_));
  }
  explicit Stream(const Device &&device) = delete; // it ends before the stream
  Stream(Stream &&other) noexcept
      : device_(other.device_), stream_(std::exchange(other.stream_, nullptr)) {}
  // By value: the stream that this was ends here, and not with `other`.
  Stream &operator=(Stream other) noexcept {
    std::swap(device_, other.device_);
    std::swap(stream_, other.stream_);
    return *this;
  }
  Stream(const Stream &) = delete;
  ~Stream() {
    if (stream_ != nullptr)
      static_cast<void>(warpipe_stream_destroy(device_, stream_));
  }

  // A CUstream, on CUDA: `static_cast<cudaStream_t>(stream.get())`.
  void *get() const noexcept { return stream_; }
  operator void *() const noexcept { return stream_; }

  // Waits on the CPU until all work enqueued so far is done.
  void synchronize(Duration timeout) const {
    check(warpipe_stream_synchronize(device_, stream_, nanoseconds(timeout)));
  }
  // Makes this stream wait, on the device, for the work enqueued on `other` so far.
  void wait_for(void *other) const { check(warpipe_stream_wait_for(device_, stream_, other)); }

  // Runs a function on the CPU in the stream's order. It must not call this library or the device,
  // and must not throw.
  template <class Function> void call(Function function) const {
    auto kept = std::make_unique<Function>(std::move(function));
    const auto run = [](void *argument) noexcept {
      const std::unique_ptr<Function> called(static_cast<Function *>(argument));
      (*called)();
    };
    // Thrown before the function ends, which may have calls of its own that fail.
    check(warpipe_stream_call(device_, stream_, run, kept.get()));
    static_cast<void>(kept.release());
  }

private:
  warpipe_device *device_;
  void *stream_ = nullptr;
};

// The element type of a C++ type.
template <class T> constexpr std::uint32_t dtype_of() {
  using U = std::remove_cv_t<T>;
  static_assert(std::is_arithmetic_v<U>, "give the warpipe_dtype by its name");
  if constexpr (std::is_same_v<U, bool>)
    return WARPIPE_BOOL;
  else if constexpr (std::is_floating_point_v<U>)
    return (2u << 8) | (8 * sizeof(U));
  else
    return ((std::is_signed_v<U> ? 0u : 1u) << 8) | (8 * sizeof(U));
}

namespace detail {
// Throws where T takes the elements for other numbers. Integers stand for any, and any for bytes.
template <class T> void check_elements(const warpipe_layout &layout) {
  static_assert(is_plain<T>, "elements are copied as bytes; for bool take std::uint8_t");
  if constexpr (std::is_floating_point_v<T>)
    if (layout.dtype != dtype_of<T>() && layout.dtype != WARPIPE_UINT8)
      throw Error(WARPIPE_INVALID_INPUT,
                  "the elements have warpipe_dtype " + std::to_string(layout.dtype) + ", not " +
                      std::to_string(dtype_of<T>()) + "; take their type, or integers as wide");
}
} // namespace detail

// The layout of a tensor: element type, shape, strides, offset.
class Layout {
public:
  explicit Layout(const warpipe_layout &layout) : layout_(layout) {}

  // Row-major without gaps.
  static Layout contiguous(std::uint32_t dtype, const std::vector<std::uint64_t> &shape) {
    warpipe_layout layout;
    check(warpipe_layout_contiguous(dtype, shape.data(), static_cast<std::uint32_t>(shape.size()),
                                    &layout));
    return Layout(layout);
  }
  template <class T> static Layout contiguous(const std::vector<std::uint64_t> &shape) {
    return contiguous(dtype_of<T>(), shape);
  }

  const warpipe_layout *get() const noexcept { return &layout_; }
  std::uint32_t dtype() const noexcept { return layout_.dtype; }
  View<const std::uint64_t> shape() const & { return {layout_.shape, layout_.rank}; }
  // In elements.
  View<const std::int64_t> strides() const & { return {layout_.strides, layout_.rank}; }
  // Copies, of a layout that ends with the expression, as in `for (... : sample.layout().shape())`.
  std::vector<std::uint64_t> shape() const && {
    return {layout_.shape, layout_.shape + layout_.rank};
  }
  std::vector<std::int64_t> strides() const && {
    return {layout_.strides, layout_.strides + layout_.rank};
  }
  std::size_t bytes() const noexcept { return layout_.bytes; }

  std::uint64_t elements() const {
    std::uint64_t elements = 1;
    for (const std::uint64_t length : shape())
      elements *= length;
    return elements;
  }

private:
  warpipe_layout layout_;
};

// Says later whether the data of a released sample was complete.
class Receipt : public Object<warpipe_receipt> {
public:
  using Object::Object;

  // Throws DataLost if it was not.
  void wait(Duration timeout) const { check(warpipe_receipt_wait(get(), nanoseconds(timeout))); }
};

namespace detail {
// The library calls it once, also when a call with it fails.
template <class Owner> void destroy(void *owner) { delete static_cast<Owner *>(owner); }

// What is the same of the parts of samples and of loans.
class Part {
public:
  std::string name() const { return part_.name; }
  Layout layout() const { return Layout(part_.layout); }
  // Whether it lies in its sender's own memory.
  bool is_in_place() const noexcept { return part_.is_in_place; }

protected:
  explicit Part(const warpipe_part &part) : part_(part) {}

  template <class T> T *at() const noexcept {
    return reinterpret_cast<T *>(static_cast<std::uintptr_t>(part_.data));
  }

  warpipe_part part_;
};
} // namespace detail

// One tensor of a sample of several: its memory is that sample's, and stays as long.
class SamplePart : public detail::Part {
public:
  SamplePart(const warpipe_sample *sample, const warpipe_part &part)
      : Part(part), sample_(sample) {}

  // The device address of the element with all indices 0.
  template <class T = void> const T *data() const noexcept { return at<const T>(); }
  // Waits for the data of all parts and copies this one.
  template <class T> std::vector<T> to_vector(Duration timeout) const {
    detail::check_elements<T>(part_.layout);
    std::vector<T> copy(part_.layout.bytes / sizeof(T));
    check(warpipe_sample_copy_to(sample_, part_.name, copy.data(), copy.size() * sizeof(T),
                                      nanoseconds(timeout)));
    return copy;
  }

private:
  const warpipe_sample *sample_;
};

// One tensor of a loan of several, to be filled: its memory is that loan's.
class LoanPart : public detail::Part {
public:
  LoanPart(warpipe_loan *loan, const warpipe_part &part) : Part(part), loan_(loan) {}

  // The device address of the element with all indices 0.
  template <class T = void> T *data() const noexcept { return at<T>(); }
  // Copies the whole contents from memory of the host.
  void write(void *stream, const void *data, std::size_t bytes) {
    check(warpipe_loan_write(loan_, stream, part_.name, data, bytes));
  }
  template <class T> void write(void *stream, const std::vector<T> &data) {
    detail::check_elements<T>(part_.layout);
    write(stream, data.data(), data.size() * sizeof(T));
  }

private:
  warpipe_loan *loan_;
};

namespace detail {
template <class Part, class Object, class List>
std::vector<Part> parts(Object *object, List list) {
  std::vector<warpipe_part> found(16);
  for (;;) {
    std::size_t count = 0;
    check(list(object, found.data(), found.size(), &count));
    const bool all = count <= found.size();
    found.resize(count);
    if (!all)
      continue;
    std::vector<Part> parts;
    for (const warpipe_part &part : found)
      parts.emplace_back(object, part);
    return parts;
  }
}
} // namespace detail

// A tensor in another process's memory, which this one may only read. Destroyed, it is released
// behind the work of the stream that it was received with.
class Sample : public Object<warpipe_sample> {
public:
  Sample() = default;
  explicit Sample(warpipe_sample *sample) : Object(sample) {
    check(warpipe_sample_get_info(sample, &info_));
  }

  const warpipe_sample_info &info() const noexcept { return info_; }
  Layout layout() const { return Layout(info_.layout); }
  std::uint64_t sequence() const noexcept { return info_.sequence; }
  // Valid as long as the object has its sample.
  View<const std::uint8_t> metadata() const & {
    return {*this ? info_.metadata : nullptr, *this ? info_.metadata_bytes : 0};
  }
  View<const std::uint8_t> metadata() const && = delete; // it ends with the object

  // The device address of the element with all indices 0; null once this is empty.
  template <class T = void> const T *data() const noexcept {
    return *this ? reinterpret_cast<const T *>(static_cast<std::uintptr_t>(info_.data)) : nullptr;
  }

  // Its tensors, if it was sent with several: else none.
  std::vector<SamplePart> parts() const & {
    return detail::parts<SamplePart>(get(), warpipe_sample_list_parts);
  }
  // The tensor of this name.
  SamplePart operator[](const std::string &name) const & {
    warpipe_part part;
    check(warpipe_sample_get_part(get(), name.c_str(), &part));
    return SamplePart(get(), part);
  }
  std::vector<SamplePart> parts() const && = delete; // their memory ends with the object
  SamplePart operator[](const std::string &name) const && = delete;

  void wait(Duration timeout) const { check(warpipe_sample_wait(get(), nanoseconds(timeout))); }
  void wait_on(void *stream) const { check(warpipe_sample_wait_on(get(), stream)); }
  bool is_complete() const {
    bool complete = false;
    check(warpipe_sample_is_complete(get(), &complete));
    return complete;
  }

  // Waits for the data and copies the whole slot.
  template <class T> std::vector<T> to_vector(Duration timeout) const {
    detail::check_elements<T>(info_.layout);
    std::vector<T> copy(info_.layout.bytes / sizeof(T));
    check(warpipe_sample_copy_to(get(), nullptr, copy.data(), copy.size() * sizeof(T),
                                 nanoseconds(timeout)));
    return copy;
  }

  // Releases it without a receipt: one that another thread uses stays this one's.
  void close() {
    if (*this)
      closed(warpipe_sample_release(get(), nullptr));
  }
  // Waits until the data is complete, and releases it; throws DataLost if its sender died first.
  void finish(Duration timeout) {
    closed(warpipe_sample_finish(get(), nanoseconds(timeout)));
  }
  Receipt release() {
    warpipe_receipt *receipt = nullptr;
    closed(warpipe_sample_release(get(), &receipt));
    return Receipt(receipt);
  }
  // Behind the work of another stream, which was made to wait for that of receive().
  Receipt release_on(void *stream) {
    warpipe_receipt *receipt = nullptr;
    check(warpipe_sample_release_on(get(), stream, &receipt));
    forget();
    return Receipt(receipt);
  }

  // A tensor for another framework, which releases the sample: at::fromDLPack and its like.
  DLManagedTensorVersioned *to_dlpack() {
    DLManagedTensorVersioned *tensor = nullptr;
    check(warpipe_sample_to_dlpack(get(), &tensor));
    forget();
    return tensor;
  }
  DLManagedTensor *to_dlpack_legacy() { return detail::legacy(to_dlpack()); }

private:
  warpipe_sample_info info_{};
};

class Published;

// Memory to fill, on a stream, and to send, to submit, or to answer with. Destroyed, it returns
// behind the work of the stream of the last call that took both.
class Loan : public Object<warpipe_loan> {
public:
  Loan() = default;
  explicit Loan(warpipe_loan *loan) : Object(loan) { check(warpipe_loan_get_info(loan, &info_)); }

  Layout layout() const { return Layout(info_.layout); }
  // The device address of the element with all indices 0; null once this is empty.
  template <class T = void> T *data() const noexcept {
    return *this ? reinterpret_cast<T *>(static_cast<std::uintptr_t>(info_.data)) : nullptr;
  }

  void set_metadata(const void *metadata, std::size_t bytes) {
    check(warpipe_loan_set_metadata(get(), metadata, bytes));
  }
  // Copies the whole contents from memory of the host.
  void write(void *stream, const void *data, std::size_t bytes) {
    check(warpipe_loan_write(get(), stream, nullptr, data, bytes));
  }
  template <class T> void write(void *stream, const std::vector<T> &data) {
    detail::check_elements<T>(info_.layout);
    write(stream, data.data(), data.size() * sizeof(T));
  }
  // Copies a tensor of another framework, which stays the caller's.
  void write_dlpack(void *stream, const DLManagedTensorVersioned *tensor) {
    check(warpipe_loan_write_dlpack(get(), stream, tensor));
  }
  void write_dlpack(void *stream, const DLManagedTensor *tensor) {
    check(warpipe_loan_write_dlpack_legacy(get(), stream, tensor));
  }

  // Its tensors, if it is one of loan_parts(): else none.
  std::vector<LoanPart> parts() const & {
    return detail::parts<LoanPart>(get(), warpipe_loan_list_parts);
  }
  // The tensor of this name.
  LoanPart operator[](const std::string &name) const & {
    warpipe_part part;
    check(warpipe_loan_get_part(get(), name.c_str(), &part));
    return LoanPart(get(), part);
  }
  std::vector<LoanPart> parts() const && = delete; // their memory ends with the object
  LoanPart operator[](const std::string &name) const && = delete;
  // Adds a tensor that is sent where it lies, as Publisher::loan_in() and loan_at() do.
  template <class Owner>
  void add_part_in(const std::string &name, const Published &memory, std::uint64_t offset,
                   const Layout &layout, Owner owner);
  template <class Owner>
  void add_part_at(const std::string &name, std::uint64_t data, const Layout &layout, Owner owner) {
    check(warpipe_loan_add_part(get(), name.c_str(), nullptr, data, layout.get(),
                                detail::destroy<Owner>, new Owner(std::move(owner))));
  }

  // Sends a publisher's loan, behind the stream's work; its number. A loan that is not sent because
  // of the policy may be sent again. The timeout is for WARPIPE_POLICY_BLOCK.
  std::uint64_t send(void *stream, Duration timeout = usual_timeout) {
    std::uint64_t sequence = 0;
    used(warpipe_loan_send(get(), stream, nanoseconds(timeout), &sequence));
    return sequence;
  }
  void discard(void *stream) {
    check(warpipe_loan_discard(get(), stream));
    forget();
  }

  DLManagedTensorVersioned *to_dlpack() const {
    DLManagedTensorVersioned *tensor = nullptr;
    check(warpipe_loan_to_dlpack(get(), &tensor));
    return tensor;
  }
  DLManagedTensor *to_dlpack_legacy() const { return detail::legacy(to_dlpack()); }

  // After a call that takes the loan when it succeeds.
  void used(warpipe_status status) {
    // The driver failed behind the point of no return, and the library has closed the loan: closing
    // it again is refused, and harmless.
    if (status == WARPIPE_OK)
      forget();
    check(status);
  }

private:
  warpipe_loan_info info_{};
};

// Hands tensors to any number of subscribers.
class Publisher : public Object<warpipe_publisher> {
public:
  explicit Publisher(const std::string &name, const PublisherOptions &options = {}) {
    check(warpipe_publisher_create(name.c_str(), &options, place()));
  }

  Loan loan(const Layout &layout) const {
    warpipe_loan *loan = nullptr;
    check(warpipe_publisher_loan(get(), layout.get(), &loan));
    return Loan(loan);
  }
  // Lends memory for several tensors, by their names, which are sent as one sample. Each begins at a
  // multiple of 256 bytes: `loan["image"].write(stream, pixels)`.
  Loan loan_parts(const std::vector<std::pair<std::string, Layout>> &parts) const {
    std::vector<warpipe_part> named;
    for (const auto &[name, layout] : parts) {
      warpipe_part part{};
      // One that is too long has no end, and is refused.
      name.copy(part.name, sizeof part.name);
      part.layout = *layout.get();
      named.push_back(part);
    }
    warpipe_loan *loan = nullptr;
    check(warpipe_publisher_loan_parts(get(), named.data(), named.size(), &loan));
    return Loan(loan);
  }
  // Lends published memory from byte `offset` on, to be sent where it lies. The owner is kept until
  // no subscriber reads it, and destroyed by any thread.
  template <class Owner>
  Loan loan_in(const Published &memory, std::uint64_t offset, const Layout &layout,
               Owner owner) const;
  // As above, memory of `cudaMalloc` from this device address on.
  template <class Owner>
  Loan loan_at(std::uint64_t data, const Layout &layout, Owner owner) const {
    warpipe_loan *loan = nullptr;
    check(warpipe_publisher_loan_in(get(), nullptr, data, layout.get(), detail::destroy<Owner>,
                                    new Owner(std::move(owner)), &loan));
    return Loan(loan);
  }
  // Copies from memory of the host, and sends.
  template <class T>
  std::uint64_t send(void *stream, const Layout &layout, const std::vector<T> &data) const {
    detail::check_elements<T>(*layout.get());
    std::uint64_t sequence = 0;
    check(warpipe_publisher_send_host(get(), stream, layout.get(), data.data(),
                                      data.size() * sizeof(T), &sequence));
    return sequence;
  }
  // Copies a tensor of another framework, and sends it.
  std::uint64_t send_dlpack(void *stream, const DLManagedTensorVersioned *tensor) const {
    warpipe_layout layout;
    check(warpipe_dlpack_get_layout(tensor, &layout));
    return copied(stream, layout, tensor);
  }
  std::uint64_t send_dlpack(void *stream, const DLManagedTensor *tensor) const {
    warpipe_layout layout;
    check(warpipe_dlpack_get_layout_legacy(tensor, &layout));
    return copied(stream, layout, tensor);
  }

  void wait_for_subscribers(std::size_t count, Duration timeout) const {
    check(warpipe_publisher_wait_for_subscribers(get(), count, nanoseconds(timeout)));
  }
  std::vector<warpipe_subscriber_info> subscribers() const {
    std::vector<warpipe_subscriber_info> found(16);
    for (;;) {
      std::size_t count = 0;
      check(warpipe_publisher_list_subscribers(get(), found.data(), found.size(), &count));
      const bool all = count <= found.size();
      found.resize(count);
      if (all)
        return found;
    }
  }

private:
  template <class Tensor>
  std::uint64_t copied(void *stream, const warpipe_layout &layout, const Tensor *tensor) const {
    Loan loan = this->loan(Layout(layout));
    loan.write_dlpack(stream, tensor);
    return loan.send(stream);
  }
};

class Subscriber;

// The samples of a subscriber until its publisher closes, for a range-based `for`.
class Samples {
public:
  class Iterator {
  public:
    Iterator() = default;
    explicit Iterator(Samples *samples) : samples_(samples) { ++*this; }
    Sample &operator*() { return sample_; }
    inline Iterator &operator++();
    bool operator!=(const Iterator &other) const { return samples_ != other.samples_; }

  private:
    Samples *samples_ = nullptr;
    Sample sample_;
  };

  Samples(Subscriber &subscriber, void *stream, Duration timeout)
      : subscriber_(&subscriber), stream_(stream), timeout_(timeout) {}
  Iterator begin() { return Iterator(this); }
  Iterator end() { return Iterator(); }

private:
  Subscriber *subscriber_;
  void *stream_;
  Duration timeout_;
};

// Receives the tensors of one publisher.
class Subscriber : public Object<warpipe_subscriber> {
public:
  explicit Subscriber(const std::string &name, const SubscriberOptions &options = {}) {
    check(warpipe_subscriber_open(name.c_str(), &options, place()));
  }

  // The next sample; `stream` waits, on the device, until its data is complete.
  Sample receive(void *stream, Duration timeout) {
    warpipe_sample *sample = nullptr;
    check(warpipe_subscriber_receive(get(), stream, nanoseconds(timeout), &sample));
    return Sample(sample);
  }
  // Releases `previous`, and receives the next sample with its stream: in one call of the driver
  // while the data of both is not complete.
  Sample receive_next(Sample previous, Duration timeout) {
    warpipe_sample *sample = nullptr;
    check(warpipe_subscriber_receive_next(get(), previous.get(), nanoseconds(timeout), &sample));
    static_cast<void>(previous.release_handle());
    return Sample(sample);
  }
  // All samples until the publisher closes. Throws PeerGone if it died instead, and Timeout if none
  // comes for so long.
  Samples samples(void *stream, Duration timeout) & { return Samples(*this, stream, timeout); }
  Samples samples(void *stream, Duration timeout) && = delete; // it ends before the loop

  // Readable when receive() without a wait is worth a call.
  int fd() const {
    std::int32_t fd = -1;
    check(warpipe_get_fd(get(), &fd));
    return fd;
  }
  // The publisher, and how much of it was missed.
  warpipe_publisher_info publisher() const {
    warpipe_publisher_info info;
    check(warpipe_subscriber_get_info(get(), &info));
    return info;
  }
  // Samples that the publisher's policy kept from this subscriber.
  std::uint64_t dropped() const { return publisher().dropped; }
};

inline Samples::Iterator &Samples::Iterator::operator++() {
  Subscriber &subscriber = *samples_->subscriber_;
  // The last one goes back before the next is waited for.
  try {
    sample_ = sample_ ? subscriber.receive_next(std::move(sample_), samples_->timeout_)
                      : subscriber.receive(samples_->stream_, samples_->timeout_);
  } catch (const PeerGone &gone) {
    if (!gone.peer_closed())
      throw;
    samples_ = nullptr;
  }
  return *this;
}

// The number of a submitted job, or of a request that was sent, and the right to its result.
// Destroyed, it leaves a job as it is, and withdraws a request.
class Job : public Object<warpipe_job> {
public:
  using Object::Object;

  std::uint64_t id() const {
    std::uint64_t id = 0;
    check(warpipe_job_get_id(get(), &id));
    return id;
  }
  Sample wait(void *stream, Duration timeout) const {
    warpipe_sample *sample = nullptr;
    check(warpipe_job_wait(get(), stream, nanoseconds(timeout), &sample));
    return Sample(sample);
  }
  bool is_done() const {
    bool done = false;
    check(warpipe_job_is_done(get(), &done));
    return done;
  }
  bool cancel() const {
    bool cancelled = false;
    check(warpipe_job_cancel(get(), &cancelled));
    return cancelled;
  }
};

// A descriptor that is readable when results may have come, for an event loop.
class Watch : public Object<warpipe_watch> {
public:
  using Object::Object;

  int fd() const {
    std::int32_t fd = -1;
    check(warpipe_get_fd(get(), &fd));
    return fd;
  }
  // Before looking at the results: what comes from now on makes it readable again.
  void quiet() const { check(warpipe_watch_quiet(get())); }
};

// Hands jobs to workers, each to one, and gets each one's result once.
class Queue : public Object<warpipe_queue> {
public:
  explicit Queue(const std::string &name, const QueueOptions &options = {}) {
    check(warpipe_queue_create(name.c_str(), &options, place()));
  }

  Loan loan(const Layout &layout) const {
    warpipe_loan *loan = nullptr;
    check(warpipe_queue_loan(get(), layout.get(), &loan));
    return Loan(loan);
  }
  // The loan stays the caller's if this throws, unless the driver failed.
  Job submit(Loan &loan, void *stream, Duration timeout = usual_timeout) const {
    warpipe_job *job = nullptr;
    loan.used(warpipe_queue_submit(get(), loan.get(), stream, nanoseconds(timeout), &job));
    return Job(job);
  }
  Job submit(Loan &&loan, void *stream, Duration timeout = usual_timeout) const {
    return submit(loan, stream, timeout);
  }
  Sample next_result(void *stream, Duration timeout) const {
    warpipe_sample *sample = nullptr;
    check(warpipe_queue_next_result(get(), stream, nanoseconds(timeout), &sample, nullptr));
    return Sample(sample);
  }

  void wait_for_workers(std::size_t count, Duration timeout) const {
    check(warpipe_queue_wait_for_workers(get(), count, nanoseconds(timeout)));
  }
  // Waits until every job has an outcome.
  void drain(Duration timeout) const { check(warpipe_queue_drain(get(), nanoseconds(timeout))); }
  // Drains, and tells the workers that no job will come.
  void shutdown(Duration timeout) const {
    check(warpipe_queue_shutdown(get(), nanoseconds(timeout)));
  }
  warpipe_queue_state state() const {
    warpipe_queue_state state{};
    check(warpipe_queue_get_state(get(), &state, nullptr, 0));
    return state;
  }
  Watch watch() const {
    warpipe_watch *watch = nullptr;
    check(warpipe_queue_watch(get(), &watch));
    return Watch(watch);
  }
};

// A job or a request that this process works on: its input, and the answer that it owes. Destroyed
// without an answer, it is a failed attempt.
class Lease : public Object<warpipe_lease> {
public:
  Lease() = default;
  Lease(warpipe_lease *lease, warpipe_sample *input)
      : Object(lease), input_(Sample(input)), info_(input_.sample.info()) {}

  // The input, which is released after the answer.
  const Sample &input() const & noexcept { return input_.sample; }
  const Sample &input() const && = delete; // it ends with the object
  const warpipe_sample_info &info() const noexcept { return info_; }
  Layout layout() const { return Layout(info_.layout); }
  std::uint64_t job() const noexcept { return info_.job; }
  std::uint32_t attempt() const noexcept { return info_.attempt; }
  // Valid as long as the object has its input.
  View<const std::uint8_t> metadata() const & { return input_.sample.metadata(); }
  View<const std::uint8_t> metadata() const && = delete; // it ends with the object
  template <class T = void> const T *data() const noexcept { return input_.sample.data<T>(); }

  void wait(Duration timeout) const { input_.sample.wait(timeout); }
  template <class T> std::vector<T> to_vector(Duration timeout) const {
    return input_.sample.to_vector<T>(timeout);
  }

  // Memory for the result.
  Loan output(const Layout &layout) const {
    warpipe_loan *loan = nullptr;
    check(warpipe_lease_output(get(), layout.get(), &loan));
    return Loan(loan);
  }
  void complete(void *stream, Duration timeout = usual_timeout) {
    input_.behind = stream;
    answered(warpipe_lease_complete(get(), nullptr, stream, nanoseconds(timeout)));
  }
  void complete(Loan &&output, void *stream, Duration timeout = usual_timeout) {
    warpipe_loan *const filled = output.opened(); // an empty one is no answer without a result
    // Whatever the result: work that is enqueued there reads the input.
    input_.behind = stream;
    output.used(warpipe_lease_complete(get(), filled, stream, nanoseconds(timeout)));
    answered(WARPIPE_OK);
  }
  // Without an answer, as the destructor does.
  void close() { answered(warpipe_close(get())); }
  // The attempt failed: the job is tried again, as often as the queue allows.
  void fail(const std::string &reason, Duration timeout = usual_timeout) {
    answered(warpipe_lease_fail(get(), reason.c_str(), nanoseconds(timeout)));
  }
  // The job cannot be done: it is not tried again.
  void reject(const std::string &reason, Duration timeout = usual_timeout) {
    answered(warpipe_lease_reject(get(), reason.c_str(), nanoseconds(timeout)));
  }
  // Gives the job back, without counting an attempt.
  void requeue(Duration timeout = usual_timeout) {
    answered(warpipe_lease_requeue(get(), nanoseconds(timeout)));
  }
  // The input, for work that needs it beyond the answer. The lease keeps the answer.
  Sample split() {
    // The sample alone keeps these valid from now on.
    info_.data = info_.slot = 0;
    info_.metadata = nullptr;
    info_.metadata_bytes = 0;
    return std::exchange(input_, Input()).sample;
  }

private:
  // A sample that is released behind the stream of the last answer that was tried.
  struct Input {
    Input() = default;
    explicit Input(Sample received) noexcept : sample(std::move(received)) {}
    Input(Input &&other) = default;
    // By value: the input that this was ends here, and not with `other`.
    Input &operator=(Input other) noexcept {
      std::swap(sample, other.sample);
      std::swap(behind, other.behind);
      return *this;
    }
    ~Input() {
      if (behind && sample &&
          warpipe_sample_release_on(sample.get(), *behind, nullptr) == WARPIPE_OK)
        static_cast<void>(sample.release_handle());
    }

    Sample sample;
    std::optional<void *> behind;
  };

  void answered(warpipe_status status) {
    check(status);
    forget();
    const Input released = std::exchange(input_, Input());
  }

  Input input_;
  warpipe_sample_info info_{};
};

// Takes jobs of a queue.
class Worker : public Object<warpipe_worker> {
public:
  explicit Worker(const std::string &queue, const WorkerOptions &options = {}) {
    check(warpipe_worker_open(queue.c_str(), &options, place()));
  }

  Lease lease(void *stream, Duration timeout) {
    warpipe_lease *lease = nullptr;
    warpipe_sample *input = nullptr;
    check(warpipe_worker_lease(get(), stream, nanoseconds(timeout), &lease, &input));
    return Lease(lease, input);
  }
  int fd() const {
    std::int32_t fd = -1;
    check(warpipe_get_fd(get(), &fd));
    return fd;
  }
};

// Sends requests to the servers of a service.
class Client : public Object<warpipe_client> {
public:
  explicit Client(const std::string &service, const ClientOptions &options = {}) {
    check(warpipe_client_create(service.c_str(), &options, place()));
  }

  Loan loan(const Layout &layout) const {
    warpipe_loan *loan = nullptr;
    check(warpipe_client_loan(get(), layout.get(), &loan));
    return Loan(loan);
  }
  Sample call(Loan &&loan, void *stream, Duration deadline) const {
    return request(std::move(loan), stream, deadline).wait(stream, Duration::max());
  }
  Job request(Loan &&loan, void *stream, Duration deadline) const {
    warpipe_job *request = nullptr;
    loan.used(warpipe_client_request(get(), loan.get(), stream, nanoseconds(deadline), &request));
    return Job(request);
  }
  Watch watch() const {
    warpipe_watch *watch = nullptr;
    check(warpipe_client_watch(get(), &watch));
    return Watch(watch);
  }
  // A server attaches to a new client while it is in accept().
  void wait_for_servers(std::size_t count, Duration timeout) const {
    check(warpipe_client_wait_for_servers(get(), count, nanoseconds(timeout)));
  }
};

// Answers the requests of all clients of a service.
class Server : public Object<warpipe_server> {
public:
  explicit Server(const std::string &service, const ServerOptions &options = {}) {
    check(warpipe_server_create(service.c_str(), &options, place()));
  }

  Lease accept(void *stream, Duration timeout) {
    warpipe_lease *lease = nullptr;
    warpipe_sample *input = nullptr;
    check(warpipe_server_accept(get(), stream, nanoseconds(timeout), &lease, &input));
    return Lease(lease, input);
  }
  int fd() const {
    std::int32_t fd = -1;
    check(warpipe_get_fd(get(), &fd));
    return fd;
  }
};

namespace detail {
// A text that a function of warpipe.h writes: called again with room if there was too little.
template <class Write> std::string text(Write write) {
  std::string text(255, '\0');
  for (;;) {
    std::size_t length = 0;
    const warpipe_status status = write(text.data(), text.size() + 1, &length);
    const bool is_short = length > text.size();
    if (status != WARPIPE_OK && !is_short)
      check(status);
    text.resize(length);
    if (!is_short)
      return text;
  }
}
} // namespace detail

// Memory of a device: allocated here, opened by a ticket or a legacy handle, or a block of a pool.
class Memory : public Object<warpipe_memory> {
public:
  using Object::Object;

  static Memory allocate(const Device &device, std::uint64_t bytes) {
    warpipe_memory *memory = nullptr;
    check(warpipe_memory_allocate(device.opened(), bytes, &memory));
    return Memory(memory);
  }
  // What a ticket of another process names.
  static Memory open(const std::string &ticket, const Device &device, Duration timeout) {
    warpipe_memory *memory = nullptr;
    check(warpipe_ticket_open(ticket.c_str(), device.opened(), nanoseconds(timeout), &memory));
    return Memory(memory);
  }
  // What a CUDA IPC handle of warpipe_legacy_export names.
  static Memory open_legacy(const std::string &handle, const Device &device) {
    warpipe_memory *memory = nullptr;
    check(warpipe_legacy_open(handle.c_str(), device.opened(), &memory));
    return Memory(memory);
  }

  // A CUDA IPC handle, as a text, of memory that another allocator made with cudaMalloc. The memory
  // has to stay as long as others use it.
  static std::string export_legacy(const Device &device, const void *data, std::uint64_t bytes) {
    const auto address = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(data));
    return detail::text([&](char *buffer, std::size_t capacity, std::size_t *length) {
      return warpipe_legacy_export(device.get(), address, bytes, buffer, capacity, length);
    });
  }

  warpipe_memory_info info() const {
    warpipe_memory_info info;
    check(warpipe_memory_get_info(get(), &info));
    return info;
  }
  template <class T = void> T *data() const {
    return reinterpret_cast<T *>(static_cast<std::uintptr_t>(info().data));
  }
  std::uint64_t bytes() const { return info().bytes; }

  void write(void *stream, std::uint64_t offset, const void *data, std::size_t bytes) const {
    check(warpipe_memory_write(get(), stream, offset, data, bytes));
  }
  template <class T> std::vector<T> to_vector(Duration timeout) const {
    static_assert(detail::is_plain<T>, "elements are copied as bytes; for bool take std::uint8_t");
    std::vector<T> copy(bytes() / sizeof(T));
    check(warpipe_memory_copy_to(get(), 0, copy.data(), copy.size() * sizeof(T),
                                 nanoseconds(timeout)));
    return copy;
  }
  // A view for another framework, which keeps the memory open.
  DLManagedTensorVersioned *to_dlpack(const Layout &layout) const {
    DLManagedTensorVersioned *tensor = nullptr;
    check(warpipe_memory_to_dlpack(get(), layout.get(), &tensor));
    return tensor;
  }
  DLManagedTensor *to_dlpack_legacy(const Layout &layout) const {
    return detail::legacy(to_dlpack(layout));
  }
  // Its end is ordered behind the stream's work.
  void used_on(void *stream) const { check(warpipe_memory_used_on(get(), stream)); }
  // Lends a block of a pool; the ticket for the other process.
  std::string lend(warpipe_access access) const {
    return detail::text([&](char *buffer, std::size_t capacity, std::size_t *length) {
      return warpipe_memory_lend(get(), access, buffer, capacity, length);
    });
  }
};

// Memory that others may open by name or ticket as long as this lives.
class Published : public Object<warpipe_published> {
public:
  Published(const Memory &memory, const std::string &name, const PublishOptions &options = {}) {
    check(warpipe_memory_publish(memory.get(), name.c_str(), &options, place()));
  }

  // For `bytes` bytes from `offset` on, or all from there: it opens as that range alone.
  std::string ticket(std::uint64_t offset = 0, std::uint64_t bytes = 0) const {
    return detail::text([&](char *buffer, std::size_t capacity, std::size_t *length) {
      return warpipe_published_get_ticket(get(), offset, bytes, buffer, capacity, length);
    });
  }
};

template <class Owner>
Loan Publisher::loan_in(const Published &memory, std::uint64_t offset, const Layout &layout,
                        Owner owner) const {
  warpipe_loan *loan = nullptr;
  const warpipe_published *const lent = memory.opened(); // before `new`
  check(warpipe_publisher_loan_in(get(), lent, offset, layout.get(), detail::destroy<Owner>,
                                  new Owner(std::move(owner)), &loan));
  return Loan(loan);
}

template <class Owner>
void Loan::add_part_in(const std::string &name, const Published &memory, std::uint64_t offset,
                       const Layout &layout, Owner owner) {
  const warpipe_published *const lent = memory.opened(); // before `new`
  check(warpipe_loan_add_part(get(), name.c_str(), lent, offset, layout.get(),
                              detail::destroy<Owner>, new Owner(std::move(owner))));
}

// Lends blocks of one process's memory.
class Pool : public Object<warpipe_pool> {
public:
  explicit Pool(const std::string &name, const PoolOptions &options = {}) {
    check(warpipe_pool_create(name.c_str(), &options, place()));
  }

  Memory allocate(std::uint64_t bytes, Duration timeout) const {
    warpipe_memory *memory = nullptr;
    check(warpipe_pool_allocate(get(), bytes, nanoseconds(timeout), &memory));
    return Memory(memory);
  }
  warpipe_pool_stats stats() const {
    warpipe_pool_stats stats;
    check(warpipe_pool_get_stats(get(), &stats));
    return stats;
  }
};

// Takes blocks of another process's pool.
class PoolClient : public Object<warpipe_pool_client> {
public:
  explicit PoolClient(const std::string &name, const OpenOptions &options = {}) {
    check(warpipe_pool_client_open(name.c_str(), &options, place()));
  }

  Memory allocate(std::uint64_t bytes, Duration timeout) const {
    warpipe_memory *memory = nullptr;
    check(warpipe_pool_client_allocate(get(), bytes, nanoseconds(timeout), &memory));
    return Memory(memory);
  }
};

// Shares memory that other code of this process has allocated.
class AllocationServer : public Object<warpipe_allocation_server> {
public:
  AllocationServer(const std::string &name, const Device &device) {
    CreateOptions options;
    options.device = device.opened();
    check(warpipe_allocation_server_create(name.c_str(), &options, place()));
  }

  // The number by which one other process opens it; `release` as for the C function.
  std::uint64_t share(void *stream, std::uint64_t data, std::uint64_t bytes,
                      void (*release)(void *) = nullptr, void *context = nullptr) const {
    std::uint64_t number = 0;
    check(warpipe_allocation_server_share(get(), stream, data, bytes, release, context, &number));
    return number;
  }
  // False if a process has opened it.
  bool withdraw(std::uint64_t number) const {
    bool was_open = false;
    check(warpipe_allocation_server_withdraw(get(), number, &was_open));
    return !was_open;
  }
};

// Opens what an allocation server of another process shares.
class AllocationClient : public Object<warpipe_allocation_client> {
public:
  AllocationClient() = default;
  explicit AllocationClient(const std::string &name, const OpenOptions &options = {}) {
    check(warpipe_allocation_client_open(name.c_str(), &options, place()));
  }

  Memory open(std::uint64_t number, Duration timeout) const {
    warpipe_memory *memory = nullptr;
    check(warpipe_allocation_client_open_share(get(), number, nanoseconds(timeout), &memory));
    return Memory(memory);
  }
};

// A number that grows: streams of other processes wait until it has reached a value.
class Timeline : public Object<warpipe_timeline> {
public:
  static Timeline create(const std::string &name, const CreateOptions &options = {}) {
    Timeline timeline;
    check(warpipe_timeline_create(name.c_str(), &options, timeline.place()));
    return timeline;
  }
  static Timeline open(const std::string &name, const OpenOptions &options = {}) {
    Timeline timeline;
    check(warpipe_timeline_open(name.c_str(), &options, timeline.place()));
    return timeline;
  }

  // Behind the stream's work.
  void signal(void *stream, std::uint64_t value) const {
    check(warpipe_timeline_signal(get(), stream, value));
  }
  void signal_now(std::uint64_t value) const { check(warpipe_timeline_signal_now(get(), value)); }
  // Makes the stream wait, on the device.
  void wait(void *stream, std::uint64_t value) const {
    check(warpipe_timeline_wait(get(), stream, value));
  }
  void wait_host(std::uint64_t value, Duration timeout) const {
    check(warpipe_timeline_wait_host(get(), value, nanoseconds(timeout)));
  }
  std::uint64_t value() const {
    std::uint64_t value = 0;
    check(warpipe_timeline_get_value(get(), &value));
    return value;
  }
};

// An event that streams of other processes wait for, and that knows its owner's death.
class Event : public Object<warpipe_event> {
public:
  explicit Event(const CreateOptions &options = {}) {
    check(warpipe_event_create(&options, place()));
  }
  static Event open(const std::string &handle, const Device &device) {
    OpenOptions options;
    options.device = device.opened();
    warpipe_event *event = nullptr;
    check(warpipe_event_open(handle.c_str(), &options, &event));
    return Event(event);
  }

  std::string handle() const {
    return detail::text([&](char *buffer, std::size_t capacity, std::size_t *length) {
      return warpipe_event_get_handle(get(), buffer, capacity, length);
    });
  }
  // The recording's number, for is_complete().
  std::uint64_t record(void *stream) const {
    std::uint64_t recording = 0;
    check(warpipe_event_record(get(), stream, &recording));
    return recording;
  }
  // Makes the stream wait, on the device, for the last recording; its number. The stream's later
  // work is valid once is_complete() says so, and lost if it throws DataLost.
  std::uint64_t wait(void *stream) const {
    std::uint64_t recording = 0;
    check(warpipe_event_wait(get(), stream, &recording));
    return recording;
  }
  bool is_complete(std::uint64_t recording) const {
    bool complete = false;
    check(warpipe_event_query(get(), recording, &complete));
    return complete;
  }
  // Of the last recording.
  bool query() const { return is_complete(0); }
  void synchronize(Duration timeout) const {
    check(warpipe_event_synchronize(get(), nanoseconds(timeout)));
  }

private:
  explicit Event(warpipe_event *event) : Object(event) {}
};

// The right to pass, given back when this is destroyed.
class Permit : public Object<warpipe_permit> {
public:
  using Object::Object;

  // Behind the stream's work.
  void release(void *stream) {
    check(warpipe_permit_release(get(), stream));
    forget();
  }
};

// A number of permits that processes share, and that a death gives back.
class Semaphore : public Object<warpipe_semaphore> {
public:
  static Semaphore create(const std::string &name, std::uint32_t permits,
                          const CreateOptions &options = {}) {
    Semaphore semaphore;
    check(warpipe_semaphore_create(name.c_str(), permits, &options, semaphore.place()));
    return semaphore;
  }
  static Semaphore open(const std::string &name, const OpenOptions &options = {}) {
    Semaphore semaphore;
    check(warpipe_semaphore_open(name.c_str(), &options, semaphore.place()));
    return semaphore;
  }

  Permit acquire(void *stream, Duration timeout) const {
    warpipe_permit *permit = nullptr;
    check(warpipe_semaphore_acquire(get(), stream, nanoseconds(timeout), &permit));
    return Permit(permit);
  }
  Permit acquire_host(Duration timeout) const {
    warpipe_permit *permit = nullptr;
    check(warpipe_semaphore_acquire_host(get(), nanoseconds(timeout), &permit));
    return Permit(permit);
  }
  warpipe_semaphore_info info() const {
    warpipe_semaphore_info info;
    check(warpipe_semaphore_get_info(get(), &info));
    return info;
  }
};

// Lists this process among the live ones of its domain.
class Member : public Object<warpipe_member> {
public:
  explicit Member(const std::string &name, const MemberOptions &options = {}) {
    check(warpipe_member_create(name.c_str(), &options, place()));
  }
};

// The live processes of a domain, and their changes.
class Members : public Object<warpipe_members> {
public:
  explicit Members(const MembersOptions &options = {}) {
    check(warpipe_members_open(&options, place()));
  }

  std::vector<warpipe_member_info> list() const {
    std::vector<warpipe_member_info> found(16);
    for (;;) {
      std::size_t count = 0;
      check(warpipe_members_list(get(), found.data(), found.size(), &count));
      const bool all = count <= found.size();
      found.resize(count);
      if (all)
        return found;
    }
  }
  // The next member that joined, left or died; none within the timeout.
  std::optional<warpipe_change> next_change(Duration timeout) const {
    warpipe_change change;
    const warpipe_status status =
        warpipe_members_next_change(get(), nanoseconds(timeout), &change);
    if (status == WARPIPE_TIMEOUT)
      return std::nullopt;
    check(status);
    return change;
  }
};

} // namespace warpipe

#endif // C++17 with exceptions

#endif // WARPIPE_HPP
