// Errors as values: no exception crosses a library boundary, no library prints or exits.
#pragma once

#include <string>
#include <utility>
#include <variant>

namespace flodl {

// The bindings map each code to one Python class (bindings/errors.cc).
enum class Code : unsigned char {
  ok,
  invalid_argument,  // the caller broke a contract
  wire,              // a peer sent bytes that no sender of ours produces
  link,              // a connection is gone; retryable
  system,            // the operating system refused; the message names the call and errno
  memory,            // not enough memory or address space
  state,             // right call, wrong moment
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  // Context first, then the system's own words for `error` (an errno value).
  static Status from_errno(const std::string& context, int error);

  bool is_ok() const { return code_ == Code::ok; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::ok;
  std::string message_;
};

template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : held_(std::move(value)) {}           // NOLINT(google-explicit-constructor)
  Result(Status failure) : held_(std::move(failure)) {}  // NOLINT(google-explicit-constructor)

  bool is_ok() const { return std::holds_alternative<T>(held_); }
  // Only where is_ok(); otherwise std::bad_variant_access, a bug of the caller.
  T& value() { return std::get<T>(held_); }
  const T& value() const { return std::get<T>(held_); }
  const Status& status() const {
    static const Status fine;
    return is_ok() ? fine : std::get<Status>(held_);
  }

 private:
  std::variant<T, Status> held_;
};

}  // namespace flodl
