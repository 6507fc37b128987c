// The blocks of one tier: who holds them, and which prefix each one caches.
//
// The oracle is the Python reference in src/penstock/kv/pool/reference.py: equal calls give equal answers.

#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "hashing.hpp"

namespace penstock {

using BlockId = std::int32_t;

// A caller broke the contract, or the state contradicts itself.
struct Broken : std::logic_error {
    using std::logic_error::logic_error;
};

// What the index of prefixes has to be told, in order; `hashes` are low halves.
struct Change {
    enum Kind { kStored, kRemoved, kCleared };

    Kind kind;
    std::optional<std::uint64_t> parent;
    std::vector<std::uint64_t> hashes;
};

// Blocks that went to make room, each the parent of the next; their content is in place until they are written to.
struct GivenUp {
    std::vector<BlockId> ids;
    std::vector<Hash> hashes;
    std::optional<std::uint64_t> parent;  // low half of the block before the first
};

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

// Reference-counted blocks with a prefix cache; its memory grows with the blocks that were ever used.
//
// A block is free, referenced by at least one sequence, or idle: cached and referenced by nobody. Idle blocks are in
// a list, longest unused first, and are given up from there when free ones run out.
class Pool {
  public:
    explicit Pool(std::size_t num_blocks) : num_blocks_(num_blocks) {}

    std::size_t num_available() const { return num_blocks_ - blocks_.size() + free_.size() + num_idle_; }
    std::size_t num_active() const { return num_blocks_ - num_available(); }
    std::size_t num_cached() const { return index_.size(); }

    // The resident blocks of the longest cached prefix.
    std::vector<BlockId> match(std::span<const Hash> hashes) const;

    // How many of the blocks are idle. This and what follows throws Broken for an id that is none of the pool's.
    std::size_t count_idle(std::span<const BlockId> ids) const;

    // Reference blocks once more each. Throws Broken at one that is free.
    void acquire(std::span<const BlockId> ids);

    // Have as many free blocks, if there are as many available; gives what went for it, the chain unused for longest first.
    std::vector<GivenUp> make_room(std::size_t count);

    // Take blocks with one reference each, evicting as needed; nothing if there are not as many.
    std::optional<std::vector<BlockId>> allocate(std::size_t count);

    // Drop one reference each, the last block first. Throws Broken at one that nobody holds.
    void release(std::span<const BlockId> ids);

    // Publish blocks; those of hashes that are resident stay private. `parent` comes before the first. Throws
    // std::invalid_argument without as many hashes, Broken at a block that was published before or nobody holds.
    void commit(std::span<const BlockId> ids, std::span<const Hash> hashes, std::optional<std::uint64_t> parent);

    // Forget the content of held blocks, which is wrong; they become private.
    void forget(std::span<const BlockId> ids);

    // Forget all content; held blocks become private.
    void reset();

    // What changed since the last call.
    std::vector<Change> take_changes() { return std::exchange(changes_, {}); }

    std::vector<Hash> resident_hashes() const;

    // (block, references) of those that have any, ascending.
    std::vector<std::pair<BlockId, std::int32_t>> references() const;

    // Throws Broken where the state contradicts itself.
    void check() const;

  private:
    static constexpr BlockId kNone = -1;

    struct Block {
        Hash hash{};
        std::int32_t references = 0;
        bool is_cached = false;
        bool has_parent = false;
        BlockId before = kNone;  // in the idle list
        BlockId after = kNone;
        std::uint64_t parent = 0;

        bool is_idle() const { return references == 0 && is_cached; }
    };

    Block& at(BlockId id);
    const Block& at(BlockId id) const;
    BlockId find(Hash hash) const;
    void append_idle(BlockId id);
    void unlink_idle(BlockId id);
    std::size_t num_without_eviction() const { return num_available() - num_idle_; }
    void evict(std::size_t count);
    void tell_removed(Hash hash);
    void tell_stored(std::span<const Hash> hashes, std::size_t begin, std::size_t end,
                     std::optional<std::uint64_t> parent);

    std::size_t num_blocks_;
    std::vector<Block> blocks_;  // those used so far: ids are given out in ascending order first
    std::vector<BlockId> free_;  // of those, the ones given back; the last one goes first
    BlockId first_idle_ = kNone;
    BlockId last_idle_ = kNone;
    std::size_t num_idle_ = 0;
    HashIndex index_;
    std::vector<Change> changes_;
};

}  // namespace penstock
