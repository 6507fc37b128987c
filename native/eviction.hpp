// Which idle block of a pool goes first: keyed eviction, leaf first.
//
// Among the idle blocks that no idle block needs as its parent, the one with the fewest expected seconds lost goes. Blocks
// of one class of the reuse table share a segment, in which the longest unused block comes first; only the heads of the
// segments are compared.
//
// The oracle is src/penstock/kv/pool/eviction.py: equal calls give equal answers.

#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <queue>
#include <string_view>
#include <tuple>
#include <vector>

#include "flat_map.hpp"
#include "hash_index.hpp"
#include "reuse.hpp"

namespace penstock {

// One request's use of blocks, told when it ends.
struct BlockUse {
    std::uint8_t kind = 0;                                     // of ReuseTable::kKinds
    std::int8_t priority = 0;                                  // a lower one goes first
    double until_s = std::numeric_limits<double>::infinity();  // end of the priority
    std::uint64_t tenant = 0;                                  // 0: nobody
};

// What a lost token costs: computing it takes `token_s`, more with the tokens before it, loading it from a lower tier
// `load_s`, and what takes less is done.
struct PrefillPrice {
    double token_s = 1.0;
    double deeper_s = 1.0 / 16384;  // for each token before it
    double load_s = std::numeric_limits<double>::infinity();
};

enum class PolicyKind { kLru, kSeconds };

// Throws std::invalid_argument for another name than lru and seconds.
PolicyKind policy_named(std::string_view name);

// Blocks that went a while ago, the oldest are dropped.
class Ghosts {
  public:
    struct Ghost {
        Hash hash{};
        std::uint64_t last = 0;
        std::uint32_t uses = 0;
        std::uint16_t segment = 0;
        std::uint8_t watched = 0;  // octaves of its age that `reuse_` has counted
        bool is_kept = false;
    };

    explicit Ghosts(std::size_t most) : most_(most) {}

    // Gives the one that is dropped for it.
    std::optional<Ghost> put(const Ghost& ghost);
    std::optional<Ghost> take(Hash hash);
    void clear();

  private:
    std::size_t most_;
    std::vector<Ghost> ring_;
    std::size_t next_ = 0;
    HashIndex index_;
};

class Eviction {
  public:
    Eviction(std::size_t num_blocks, std::size_t block_size, PrefillPrice price);

    // A block of the pool is taken for the first time.
    void first_taken() { ++now_; }

    // A block enters the cache as the `depth`-th of its prefix.
    void commit(BlockId id, Hash hash, std::int32_t depth);

    // A request that held the block ends.
    void use(BlockId id, const BlockUse& use);

    // Nobody holds the block, and no idle block has it as its parent: it may go.
    void add_leaf(BlockId id);
    void remove_leaf(BlockId id);

    // The block is held again, after it was idle.
    void hold(BlockId id);

    // The leaf that goes first; nothing without leaves.
    std::optional<BlockId> victim();

    // What leaves are compared by: rank, key and order; the lowest goes.
    std::tuple<std::uint8_t, double, std::uint64_t> standing(BlockId id) const;

    // What a lost token costs from now on.
    void set_price(PrefillPrice price) { price_ = price; }

    // It left the cache: evicted, or its content was wrong.
    void evicted(BlockId id, Hash hash);
    void forgotten(BlockId id);
    void reset();

    // Priorities up to that time end, of at most so many blocks, the earliest first.
    void expire(double now_s, std::size_t most);

    bool is_leaf(BlockId id) const { return at(id) < metas_.size() && metas_[at(id)].place != kNoPlace; }

    // Throws std::logic_error where heaps contradict themselves.
    void check() const;

  private:
    static constexpr std::int32_t kNoPlace = -1;
    static constexpr std::size_t kNumRanks = 16;

    struct Meta {
        std::uint64_t last = 0;   // time of its last use
        std::uint64_t order = 0;  // of its last use
        std::uint64_t unused = 0; // time that it was idle, until it was held again
        double until_s = std::numeric_limits<double>::infinity();
        std::uint32_t uses = 0;
        std::int32_t depth = 0;
        std::int32_t place = kNoPlace;  // in the heap of its segment
        std::uint16_t segment = 0;
        std::uint8_t rank = 0;
        std::uint8_t watched = 0;  // as of a ghost
    };

    struct Leaf {
        std::uint64_t order;
        BlockId id;
        bool operator<(const Leaf& other) const { return order < other.order; }
    };

    using Heap = std::vector<Leaf>;

    struct Rank {
        std::vector<Heap> segments;
        std::vector<std::uint16_t> filled;  // segments with leaves, in no order
        std::vector<std::int32_t> where;    // of a segment in `filled`
        std::size_t num_leaves = 0;
    };

    struct Deadline {
        double until_s;
        BlockId id;
        bool operator>(const Deadline& other) const {
            return until_s > other.until_s || (until_s == other.until_s && id > other.id);
        }
    };

    static std::size_t at(BlockId id) { return static_cast<std::size_t>(id); }
    Meta& meta(BlockId id);
    std::uint16_t class_of(const Meta& block, std::size_t kind) const;
    double score(BlockId id) const;
    double weight(std::int32_t depth) const;
    void place(Heap& heap, std::size_t index, Leaf leaf);
    void sift(Heap& heap, std::size_t index, Leaf leaf);

    std::size_t num_blocks_;
    std::size_t block_size_;
    PrefillPrice price_;
    std::vector<Meta> metas_;
    std::vector<Rank> ranks_;
    std::priority_queue<Deadline, std::vector<Deadline>, std::greater<>> deadlines_;
    ReuseTable reuse_;
    Ghosts ghosts_;
    std::uint64_t now_ = 0;  // blocks evicted, or taken for the first time
    std::uint64_t order_ = 0;
};

}  // namespace penstock
