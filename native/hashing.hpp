// Names of KV blocks: SipHash-2-4 with 128-bit output, chained from block to block.
//
// The oracle is the Python reference in src/penstock/core/hashing.py: equal input gives equal output.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace penstock {

struct Key {
    std::uint64_t k0;
    std::uint64_t k1;
};

struct Hash {
    std::uint64_t low;
    std::uint64_t high;

    bool operator==(const Hash&) const = default;
};

// What a block holds beside its tokens (images and the like), encoded by the caller.
struct Extra {
    std::size_t block;
    std::span<const std::uint8_t> bytes;
};

// SipHash-2-4-128 of a message.
Hash siphash128(std::span<const std::uint8_t> message, Key key);

// Hash `out.size()` blocks. The message of a block is its tokens, its extra and the hash of the block before it
// (`first` for block 0), in little-endian bytes.
//
// `tokens` holds at least out.size() * block_size ids; `extras` ascend by block, at most one a block.
using BlockHashes = void(std::span<const std::int32_t> tokens, std::size_t block_size, Hash first,
                         std::span<const Extra> extras, Key key, std::span<Hash> out);

// The fastest one that this CPU runs.
BlockHashes block_hashes;

struct Implementation {
    const char* name;
    BlockHashes* block_hashes;
};

// All that this CPU runs, fastest first; they give equal results.
std::span<const Implementation> implementations();

}  // namespace penstock
