// Threads that wait for work together. Knows nothing of what the work is.
#pragma once

#include <cstdint>
#include <functional>

namespace tidemill {

using Work = std::function<void(int64_t first, int64_t last)>;

// Calls `work` for stretches of `step` that cover 0 to `count`, on at most `threads` threads, this one among them.
// Any number of threads may call it: while the team works for one, another does its work alone. Safe after fork.
void share_out(int64_t count, int64_t step, int32_t threads, const Work& work);

}  // namespace tidemill
