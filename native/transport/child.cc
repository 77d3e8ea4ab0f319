#include "transport/child.h"

#include <signal.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <string>

namespace flodl {

Status check_child(int pid) {
  siginfo_t about{};
  const std::string context = "watching process " + std::to_string(pid);
  // 1 would make kill(-1), which is everybody.
  if (pid <= 1) return Status(Code::invalid_argument, context + ": no child has that number");
  while (::waitid(P_PID, static_cast<id_t>(pid), &about, WEXITED | WNOHANG | WNOWAIT) != 0) {
    if (errno != EINTR) return Status::from_errno(context, errno);
  }
  return {};
}

bool is_child_stopped(int pid) {
  siginfo_t about{};
  // WNOWAIT: the answer stays for whoever asks next, and nothing is reaped.
  return ::waitid(P_PID, static_cast<id_t>(pid), &about, WSTOPPED | WNOHANG | WNOWAIT) == 0 && about.si_pid == pid;
}

ChildEnd reap_child(int pid, bool kills_group) {
  constexpr int kUnknownStatus = 255;
  if (kills_group) ::kill(-pid, SIGKILL);  // ESRCH: it led no group
  int status = 0;
  pid_t reaped = 0;
  do {
    reaped = ::waitpid(pid, &status, 0);
  } while (reaped < 0 && errno == EINTR);
  if (reaped != pid) return ChildEnd{kUnknownStatus, false};
  if (WIFSIGNALED(status)) return ChildEnd{-WTERMSIG(status), true};
  return ChildEnd{WEXITSTATUS(status), true};
}

void end_own_group() {
  constexpr int kKilledExitCode = 137;  // what a shell shows for SIGKILL
  const pid_t self = ::getpid();
  if (::getpgrp() == self && ::getsid(0) == self) {
    ::kill(0, SIGKILL);  // 0, not -self: where self is 1 (a container's first process) the latter is everybody
  } else {
    ::kill(self, SIGKILL);
  }
  ::_exit(kKilledExitCode);  // the first process of a container ignores its own SIGKILL
}

}  // namespace flodl
