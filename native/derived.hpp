// Names of simulated blocks, derived from what a workload says is in them instead of from tokens.
//
// The oracle is the Python reference in src/penstock/sim/workload.py: equal input gives equal output.

#pragma once

#include <cstdint>
#include <span>

#include "hashing.hpp"

namespace penstock {

// A stream of tokens that begins with shared units and goes on as its own.
struct Stream {
    std::uint64_t own;
    std::span<const std::uint64_t> shared;
    std::uint64_t unit_tokens;  // > 0
};

// Name `out.size()` blocks of a stream from block `start` on.
void derived_hashes(const Stream& stream, std::uint64_t block_size, std::uint64_t start, std::span<Hash> out);

}  // namespace penstock
