// Threads that sleep until there is work for several: what a long copy is spread over.
//
// They are started when first asked for and stay, since starting one costs 20 to 50 us. The caller works along, so
// that a thread that wakes late delays nothing. Forking is safe: the child starts its own.

#pragma once

#include <cstddef>
#include <functional>

namespace penstock {

constexpr std::size_t kCrewMax = 64;

// Call `work(part)` once for each part below `parts`, on at most `threads` threads, the caller's among them. Parts
// begin in order. Thread-safe; returns when all are done. `work` must not throw.
void spread(std::size_t threads, std::size_t parts, const std::function<void(std::size_t)>& work);

}  // namespace penstock
