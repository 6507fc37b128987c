// Which block has a hash.

#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "hashing.hpp"

namespace penstock {

using BlockId = std::int32_t;

// Finds blocks by their hash: open addressing with linear probing, never more than half full.
//
// A slot holds 32 bits of the hash, which say where it belongs and are all that most probes read, and a block's id.
class HashIndex {
  public:
    std::size_t size() const { return size_; }

    // The block of that hash, or -1; `hash_of(id)` gives the hash of a block in the index.
    template <class HashOf>
    BlockId find(Hash hash, const HashOf& hash_of) const {
        if (slots_.empty()) {
            return kEmpty;
        }
        const std::uint32_t tag = tag_of(hash);
        for (std::size_t at = home(tag);; at = next(at)) {
            const Slot slot = slots_[at];
            if (slot.id == kEmpty || (slot.tag == tag && hash_of(slot.id) == hash)) {
                return slot.id;
            }
        }
    }

    // The hash must not be there yet.
    void insert(Hash hash, BlockId id);

    // The block must be there under that hash.
    void erase(Hash hash, BlockId id);

    void clear();

  private:
    static constexpr BlockId kEmpty = -1;

    struct Slot {
        std::uint32_t tag = 0;
        BlockId id = kEmpty;
    };

    // Hashes may be anything: the high bits of a product depend on all bits of its factors.
    static std::uint32_t tag_of(Hash hash) {
        return static_cast<std::uint32_t>(((hash.low ^ std::rotl(hash.high, 32)) * 0x9e3779b97f4a7c15) >> 32);
    }

    std::size_t home(std::uint32_t tag) const { return tag >> shift_; }
    std::size_t next(std::size_t at) const { return (at + 1) & (slots_.size() - 1); }
    void place(Slot slot);
    void grow();

    std::vector<Slot> slots_;  // a power of two
    std::size_t size_ = 0;
    int shift_ = 32;
};

}  // namespace penstock
