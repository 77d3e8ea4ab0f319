#include "core/thread.h"

#include <utility>

#if !defined(_WIN32)
#include <pthread.h>
#include <signal.h>
#endif

namespace flodl {

#if defined(_WIN32)

std::thread start_thread(const char* /*name*/, std::function<void()> body) { return std::thread(std::move(body)); }

#else

namespace {

void set_name(const char* name) {
#if defined(__APPLE__)
  pthread_setname_np(name);
#elif defined(__linux__)
  pthread_setname_np(pthread_self(), name);
#else
  (void)name;
#endif
}

sigset_t all_but_faults() {
  sigset_t signals;
  sigfillset(&signals);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS}) sigdelset(&signals, fault);
  return signals;
}

}  // namespace

std::thread start_thread(const char* name, std::function<void()> body) {
  // A thread inherits the mask of its creator, so that there is no moment at which it could be interrupted.
  const sigset_t blocked = all_but_faults();
  sigset_t before;
  pthread_sigmask(SIG_BLOCK, &blocked, &before);
  std::thread thread([name, body = std::move(body)] {
    set_name(name);
    body();
  });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

#endif

}  // namespace flodl
