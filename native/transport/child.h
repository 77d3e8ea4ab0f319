// How children end, and how this process ends when its launcher has.
#pragma once

#include "flodl/status.h"

namespace flodl {

// Code::system unless `pid` is a child of this process that nobody has reaped.
Status check_child(int pid);

// Stopped by a signal (SIGSTOP, SIGTSTP) and not continued since. A child under a debugger is not.
bool is_child_stopped(int pid);

struct ChildEnd {
  int status = 0;        // exit code, or -signal
  bool is_known = true;  // false: somebody else reaped it first, and its status is lost
};
// The child has exited. Kills its process group first if asked: as long as the leader is not reaped, its number cannot
// belong to anybody else.
ChildEnd reap_child(int pid, bool kills_group);

// Never returns. Ends the process group if this process leads it and its session, else this process alone: a group that
// somebody else leads (a shell's, a test runner's) is not ours to kill.
[[noreturn]] void end_own_group();

}  // namespace flodl
