// Lists of memory ranges: copied, moved to and from another process, checked and merged.
//
// A list is columns of equal length. The oracle is the Python reference in src/penstock/transfer/regions/ranges.py.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace penstock {

using Column = std::span<const std::uint64_t>;

// A byte that another thread sets where a long call is to end early; null where nobody does.
using Stop = const std::uint8_t*;

// Copy each range as memmove does, on at most `threads` threads. Which of two ranges that overlap each other is last
// is not defined. Every address must be mapped: a wrong one ends the process. Returns whether all was copied: it is
// not where `stop` was set before the end, at which it looks every 4 MiB.
bool copy_ranges(Column targets, Column sources, Column lengths, std::size_t threads, Stop stop);

struct Moved {
    std::uint64_t bytes;
    int error;  // an errno, 0 where all was moved
};

enum class Direction { kRead, kWrite };

// Copy ranges out of (kRead) or into (kWrite) the memory of process `pid`, without its help. The error is ECANCELED
// where `stop` was set before the end.
Moved move_between_processes(Direction direction, int pid, Column local, Column remote, Column lengths,
                             std::size_t threads, Stop stop);

// The first range that is not wholly within [0, size), or -1. A sum of offset and length that wraps around is outside.
std::ptrdiff_t first_outside(Column offsets, Column lengths, std::uint64_t size);

// Columns of a list of pairs of ranges, as long as the first; `regions` may be empty where all ranges are of one.
struct Pairs {
    Column local;
    Column remote;
    Column lengths;
    Column local_regions;
    Column remote_regions;
};

struct MergedPairs {
    std::uint64_t* local;
    std::uint64_t* remote;
    std::uint64_t* lengths;
    std::uint64_t* local_regions;
    std::uint64_t* remote_regions;
};

// Merge each pair into the one before it where it goes on on both sides, and drop empty ones. Returns how many are
// left; `merged` has room for all.
std::size_t coalesce(const Pairs& pairs, const MergedPairs& merged);

}  // namespace penstock
