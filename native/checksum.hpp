// CRC-32C (Castagnoli), as in iSCSI, ext4 and NVMe: it detects every change of up to 32 bits in a row.
//
// The oracle is the Python reference in src/penstock/transfer/regions/ranges.py.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "ranges.hpp"

namespace penstock {

// Go on from `crc`, 0 at the start: crc32c(crc32c(0, a), b) is that of a followed by b.
using Crc32c = std::uint32_t(std::uint32_t crc, std::span<const std::byte> bytes);

// The fastest one that this CPU runs.
Crc32c crc32c;

// One without instructions of its own, for CPUs that have none.
Crc32c crc32c_portable;

// Copy each range, on at most `threads` threads, and give the sum of what its target then holds, read while it is in the
// cache. Returns whether all was copied: it is not where `stop` was set before the end, at which each thread looks every 4 MiB.
bool copy_summed(Column targets, Column sources, Column lengths, std::uint32_t* sums, std::size_t threads, Stop stop);

}  // namespace penstock
