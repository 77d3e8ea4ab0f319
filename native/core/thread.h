// Threads that no signal of the process ever interrupts.
#pragma once

#include <functional>
#include <thread>

namespace flodl {

// Signals sent to the process go to other threads (Python handles them on its main thread). Faults of the thread's own
// (SIGSEGV and the like) stay deliverable. `name`: at most 15 characters, seen in ps and debuggers.
std::thread start_thread(const char* name, std::function<void()> body);

}  // namespace flodl
