// The blocks of one tier: who holds them, and which prefix each one caches.
//
// The oracle is the Python reference in src/penstock/kv/pool/reference.py: equal calls give equal answers.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "eviction.hpp"
#include "flat_map.hpp"
#include "hash_index.hpp"
#include "hashing.hpp"
#include "tenants.hpp"

namespace penstock {

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

// Reference-counted blocks with a prefix cache; its memory grows with the blocks that were ever used.
//
// A block is free, referenced by at least one sequence, or idle: cached and referenced by nobody. Idle blocks are in
// a list, longest unused first, and are given up from there when free ones run out; with `seconds`
// `Eviction` says which goes, and none before the idle blocks that have it as their parent.
class Pool {
  public:
    explicit Pool(std::size_t num_blocks) : num_blocks_(num_blocks) {}

    // With a policy; `block_size` and the price are for those that ask what a block costs. A tenant with more than
    // `tenant_blocks` idle blocks gives up its own first.
    Pool(std::size_t num_blocks, PolicyKind policy, std::size_t block_size, PrefillPrice price,
         std::size_t tenant_blocks);

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

    // Drop one reference each, the last block first, at the end of a request's use of them if there was one. Throws
    // Broken at one that nobody holds.
    void release(std::span<const BlockId> ids, const std::optional<BlockUse>& use = std::nullopt);

    // Priorities of uses up to that time end, of at most so many blocks.
    void expire(double now_s, std::size_t most) {
        if (eviction_) {
            eviction_->expire(now_s, most);
        }
    }

    // What a lost token costs from now on.
    void set_price(PrefillPrice price) {
        if (eviction_) {
            eviction_->set_price(price);
        }
    }

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

    // The idle blocks, the one unused for longest first.
    std::vector<BlockId> idle_blocks() const;

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

    // A cached block by the low half of its hash, and the idle ones that have it as their parent.
    struct Node {
        std::int32_t num_cached = 0;
        std::int32_t idle_children = 0;
        std::int32_t depth = 0;
        BlockId idle = kNone;

        bool vacant() const { return num_cached == 0 && idle_children == 0; }
    };

    Block& at(BlockId id);
    const Block& at(BlockId id) const;
    BlockId find(Hash hash) const;
    void append_idle(BlockId id);
    void unlink_idle(BlockId id);
    std::size_t num_without_eviction() const { return num_available() - num_idle_; }
    void evict(std::size_t count, std::vector<BlockId>* gone = nullptr);
    std::vector<GivenUp> chains(std::vector<BlockId> victims) const;
    BlockId victim();
    std::optional<BlockId> victim_of_tenant();
    void add_leaf(BlockId id);
    void remove_leaf(BlockId id);
    void enter_cache(BlockId id, const Block& block);
    void leave_cache(const Block& block);
    void enter_idle(BlockId id, const Block& block);
    void leave_idle(BlockId id, const Block& block);
    void check_leaves() const;
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
    std::optional<Eviction> eviction_;  // nothing: lru
    FlatMap<Node> nodes_;               // with a policy
    std::optional<Tenants> tenants_;    // where they have shares
};

}  // namespace penstock
