// Which workers hold which prefixes, in which tier, and how many copies of each block.
//
// The oracle is the Python reference in src/penstock/router/radix.py: equal calls give equal answers.

#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bucket_map.hpp"
#include "chunked.hpp"
#include "holders.hpp"

namespace penstock {

constexpr std::uint32_t kSlotsMax = 65'535;

// Hashes in somebody else's memory: packed, or every other word of a (low, high) array; of any alignment.
class HashView {
  public:
    HashView(const void* data, std::ptrdiff_t stride_bytes, std::size_t size)
        : data_(static_cast<const std::byte*>(data)), stride_bytes_(stride_bytes), size_(size) {}

    std::size_t size() const { return size_; }

    std::uint64_t operator[](std::size_t index) const {
        std::uint64_t hash;
        std::memcpy(&hash, data_ + static_cast<std::ptrdiff_t>(index) * stride_bytes_, sizeof hash);
        return hash;
    }

  private:
    const std::byte* data_;
    std::ptrdiff_t stride_bytes_;
    std::size_t size_;
};

struct RadixStats {
    std::size_t nodes;
    std::size_t pairs;
    std::size_t evicted_pairs;
    std::size_t unknown_removals;
    std::size_t contradictions;
    std::size_t bytes;
};

// What only tests change, to arrive sooner at what is rare.
struct RadixLimits {
    std::uint32_t clock_max = UINT32_MAX / 2; // stamps are renumbered when the clock arrives there
    std::size_t leaves_min = 1024;            // leaves looked up at once for eviction, at least
    std::size_t nodes_looked_at = 65'536;     // for that; of more nodes not all are
    std::uint32_t hub_children = 64;          // of a node with so many, shares are counted; with half, no more
};

// Blocks of one worker, chained and held alike.
struct Run {
    std::optional<std::uint64_t> parent;
    std::size_t end; // in the list of all runs' hashes
    std::array<std::uint32_t, kTiers> copies;
};

// The tree itself. `match` may run in several threads at once; all else needs the tree alone.
//
// Each call takes time by what it is told or asked, and not by how much the tree holds. What a cleared worker held is
// ignored at once and reclaimed bit by bit: `reclaim` does some of it, and so does each `store`.
class RadixTree {
  public:
    RadixTree(std::size_t pairs_max, std::uint32_t num_slots, RadixLimits limits = {});

    std::uint32_t num_slots() const { return static_cast<std::uint32_t>(tenant_of_.size()); }
    std::size_t pairs_max() const { return pairs_max_; }
    // Hold so many pairs at most; never fewer than before.
    void allow(std::size_t pairs_max) { pairs_max_ = std::max(pairs_max_, pairs_max); }
    std::size_t held_blocks(std::uint32_t worker) const {
        return worker < num_slots() ? tenants_[tenant_of_[worker]].held : 0;
    }
    RadixStats stats() const;

    // Raises std::length_error past `kSlotsMax`.
    void grow(std::uint32_t num_slots);

    // From now on a worker also loads what these slots hold, and no longer what others did. They are no workers: their
    // own depths are 0 as long as anybody loads what they hold. Raises std::invalid_argument where a slot would be both.
    void share(std::uint32_t worker, std::vector<std::uint32_t> sources);

    void store(std::uint32_t worker, HashView hashes, std::optional<std::uint64_t> parent, std::size_t tier);
    void remove(std::uint32_t worker, HashView hashes, std::size_t tier);
    void clear(std::uint32_t worker);

    // Look at this many blocks, or a few more, for what cleared workers held, and forget it. Gives whether there is more.
    bool reclaim(std::size_t blocks);

    // Whether any block lies at best below the device: then `match` has tiers to tell of.
    bool has_lower_tiers() const { return lower_pairs_ != 0; }

    // Write each worker's depth into `depths`, which is zeroed, and the blocks by best tier into `tiers`, if any:
    // (kTiers, depths.size()), zeroed. Workers beyond depths.size() are left out. `stamp` is when, by `claim_stamps`.
    void match(HashView hashes, std::span<std::int32_t> depths, std::int32_t* tiers, std::uint32_t stamp) const;

    // Let time pass for so many matches; gives the stamp of the first, the others' follow.
    std::uint32_t claim_stamps(std::uint32_t count) const;

    // What a worker holds, parents before children.
    std::pair<std::vector<std::uint64_t>, std::vector<Run>> runs(std::uint32_t worker) const;

    // Raise std::logic_error where the tree contradicts itself.
    void check() const;

  private:
    using NodeId = std::uint32_t;
    static constexpr NodeId kNone = UINT32_MAX;

    // 28 bytes a node. One that nobody holds is kept while it is the parent of another: it has no parent itself.
    // What a first child has for `previous` is how many children its parent has.
    struct Node {
        std::uint32_t key_low;
        std::uint32_t key_high;
        NodeId parent;
        NodeId first_child;
        NodeId next; // among the parent's children
        NodeId previous;
        std::uint32_t stamp; // when it was stored or ended a match; 0 where nobody holds it

        std::uint64_t key() const { return std::uint64_t{key_high} << 32 | key_low; }
    };
    struct Place {
        NodeId node = kNone;
        HoldersId holders = HoldersTable::kNobody;
        bool vacant() const { return node == kNone; }
    };
    // Who has a slot from one `clear` to the next; sets of holders name tenants. Those of before are ignored wherever
    // they still stand.
    struct Tenant {
        std::uint32_t slot = kGone;
        std::uint32_t held = 0;
        std::uint32_t holes = 0; // its blocks whose parent it does not hold
        std::uint32_t lower = 0; // its blocks that are not on the device
        bool contradicted = false; // what it holds was told with two parents: holes may be miscounted

        bool irregular() const { return holes != 0 || contradicted; }
    };
    // Of a tenant, how many children of a node with many it holds; there are none of 0.
    struct Share {
        std::uint32_t tenant;
        std::uint32_t children;
    };
    struct Leaf {
        std::uint32_t stamp;
        std::uint64_t key;
        auto operator<=>(const Leaf&) const = default;
    };
    class Transition;
    class Matching;
    class Purge;

    Node& node(NodeId id) { return nodes_[id]; }
    const Node& node(NodeId id) const { return nodes_[id]; }
    bool is_irregular(std::uint32_t slot) const { return tenants_[tenant_of_[slot]].irregular(); }
    bool is_source(std::uint32_t slot) const { return slot < loaders_.size() && !loaders_[slot].empty(); }
    bool has_sources(std::uint32_t slot) const { return slot < sources_.size() && !sources_[slot].empty(); }
    bool is_gone(std::uint64_t entry) const { return tenants_[worker_of(entry)].slot == kGone; }
    HoldersId holders_of(std::uint64_t key) const;
    bool is_chain(HashView hashes) const;
    bool holds(std::uint32_t tenant, NodeId id) const;
    std::uint32_t num_children(NodeId id) const;
    std::uint32_t held_children(std::uint32_t tenant, NodeId id) const;

    void grow_to_hold(std::uint32_t worker);
    std::uint32_t tick();
    void renumber_stamps();
    NodeId new_node(std::uint64_t key);
    Place find_or_add_place(std::uint64_t key);
    void free_node(NodeId id);
    void link(NodeId child, NodeId parent);
    void unlink(NodeId child);
    void forget(NodeId id);
    bool is_hub(NodeId id) const;
    void make_hub(NodeId id);
    void count_child(NodeId parent, std::uint32_t tenant, bool is_more);
    void note_contradiction(std::uint32_t tenant, HoldersId holders);
    void add_pair(std::uint32_t tenant, NodeId id, bool parent_held);
    void drop_pair(std::uint32_t tenant, NodeId id);
    void count_lower(std::uint32_t tenant, Holding before, Holding after);
    void set_irregular(Tenant& tenant, std::uint32_t holes, bool contradicted);
    std::uint32_t new_tenant(std::uint32_t slot);
    void check_shares(NodeId id) const;
    void check_sources() const;
    void purge_chain(HashView hashes, std::optional<std::uint64_t> parent);
    void drop_empty_storage();

    void evict();
    std::uint64_t oldest_leaf();
    void gather_leaves();
    std::uint32_t old_stamp() const;
    void gather_some_leaves();
    void push_leaf(NodeId id);

    static constexpr std::uint32_t kGone = UINT32_MAX;
    static constexpr std::size_t kChunkNodes = 4096;

    std::size_t pairs_max_;
    RadixLimits limits_;
    std::vector<std::uint32_t> tenant_of_; // by slot
    std::vector<std::vector<std::uint32_t>> sources_; // by slot, as far as any has some: what else it loads, ascending
    std::vector<std::vector<std::uint32_t>> loaders_; // by slot, likewise: who loads what it holds
    std::vector<std::uint32_t> sharers_;              // slots that have sources, ascending
    std::vector<Tenant> tenants_;
    std::vector<std::uint32_t> free_tenants_;
    std::vector<std::uint32_t> going_;      // tenants that the sweep under way has reclaimed once it ends
    std::vector<std::uint32_t> going_next_; // those that the next one has
    NodeId sweep_at_ = 0;
    NodeId sweep_end_ = 0;
    std::vector<std::shared_ptr<void>> dropped_; // memory to be given back
    BucketMap<Place> places_;
    HoldersTable holders_;
    Chunked<Node, kChunkNodes> nodes_;
    std::unordered_map<NodeId, std::vector<Share>> hubs_; // shares in the order of the tenants
    NodeId nodes_used_ = 0;
    NodeId free_nodes_ = kNone; // chained by `next`
    std::size_t nodes_held_ = 0;
    std::size_t pairs_ = 0;
    std::size_t lower_pairs_ = 0;
    std::size_t irregular_workers_ = 0;
    std::size_t evicted_pairs_ = 0;
    std::size_t unknown_removals_ = 0;
    std::size_t contradictions_ = 0;
    std::vector<Leaf> leaves_; // a heap, youngest at the end: leaves stamped up to `leaves_until_`, and stale ones
    std::uint32_t leaves_until_ = 0;
    bool leaves_complete_ = true; // all of those are there
    NodeId leaves_at_ = 0;        // where the next ones are looked for
    alignas(64) mutable std::atomic<std::uint32_t> clock_ = 0; // matches write it, so nothing they read lies beside it
};

}  // namespace penstock
