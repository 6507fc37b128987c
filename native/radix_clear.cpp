// How the prefix index forgets all that a worker held: at once for who asks, and bit by bit in memory.

#include "radix.hpp"

#include <algorithm>

namespace penstock {
namespace {

constexpr std::size_t kWindow = 16;      // blocks whose cache lines are fetched side by side
constexpr std::size_t kPartsAtOnce = 16; // of dropped memory, some 64 KiB each

}  // namespace

// Takes tenants that are gone out of sets of holders. Blocks are often held alike: the latest set is remembered.
class RadixTree::Purge {
  public:
    explicit Purge(RadixTree& tree) : tree_(tree) {}
    Purge(const Purge&) = delete;
    Purge& operator=(const Purge&) = delete;
    ~Purge() { remember(HoldersTable::kNobody, HoldersTable::kNobody); }

    // Forget the block if only tenants that are gone hold it. Gives how many entries were looked at.
    std::size_t run(std::uint64_t key, NodeId id) {
        HoldersTable& holders = tree_.holders_;
        Place* place = tree_.places_.find(key);
        if (place == nullptr || place->node != id || place->holders == HoldersTable::kNobody) {
            return 0;
        }
        std::size_t looked_at = 0;
        if (place->holders != from_) {
            looked_at = holders.entries(place->holders).size();
            const auto is_kept = [&](std::uint64_t entry) { return !tree_.is_gone(entry); };
            const bool all_kept = std::ranges::all_of(holders.entries(place->holders), is_kept);
            remember(place->holders, all_kept ? place->holders : holders.filtered(place->holders, is_kept));
        }
        if (from_ == to_) {
            return looked_at;
        }
        const NodeId parent = tree_.node(id).parent;
        if (parent != kNone && tree_.is_hub(parent)) {
            for (const std::uint64_t entry : holders.entries(from_)) {
                if (tree_.is_gone(entry) && parent != id) {
                    tree_.count_child(parent, worker_of(entry), false);
                }
            }
        }
        holders.retain(to_);
        holders.release(place->holders);
        place->holders = to_;
        if (to_ == HoldersTable::kNobody) {
            tree_.forget(id);
        }
        return looked_at;
    }

  private:
    void remember(HoldersId from, HoldersId to) {
        tree_.holders_.retain(from);
        tree_.holders_.retain(to);
        tree_.holders_.release(std::exchange(from_, from));
        tree_.holders_.release(std::exchange(to_, to));
    }

    RadixTree& tree_;
    HoldersId from_ = HoldersTable::kNobody;
    HoldersId to_ = HoldersTable::kNobody;
};

std::uint32_t RadixTree::new_tenant(std::uint32_t slot) {
    while (free_tenants_.empty() && tenants_.size() > kSlotsMax) { // every number is taken: wait for some
        reclaim(kChunkNodes);
    }
    std::uint32_t id;
    if (!free_tenants_.empty()) {
        id = free_tenants_.back();
        free_tenants_.pop_back();
    } else {
        id = static_cast<std::uint32_t>(tenants_.size());
        tenants_.emplace_back();
    }
    tenants_[id].slot = slot;
    return id;
}

void RadixTree::clear(std::uint32_t worker) {
    if (worker >= num_slots()) {
        return;
    }
    const std::uint32_t id = tenant_of_[worker];
    Tenant& cleared = tenants_[id];
    set_irregular(cleared, 0, false);
    if (cleared.held == 0) {
        return;
    }
    pairs_ -= cleared.held;
    lower_pairs_ -= cleared.lower;
    cleared = Tenant{};
    if (going_.empty()) {
        going_.push_back(id);
        sweep_at_ = 0;
        sweep_end_ = nodes_used_;
    } else {
        going_next_.push_back(id);
    }
    tenant_of_[worker] = new_tenant(worker);
}

bool RadixTree::reclaim(std::size_t blocks) {
    dropped_.resize(dropped_.size() - std::min(dropped_.size(), kPartsAtOnce));
    Purge purge(*this);
    for (std::size_t done = 0; !going_.empty() && done < blocks;) {
        const NodeId end = static_cast<NodeId>(std::min<std::size_t>(sweep_at_ + kWindow, sweep_end_));
        for (NodeId id = sweep_at_; id < end; ++id) {
            if (node(id).stamp != 0) {
                places_.prefetch(node(id).key());
            }
        }
        for (; sweep_at_ < end; ++sweep_at_, ++done) {
            if (node(sweep_at_).stamp != 0) {
                done += purge.run(node(sweep_at_).key(), sweep_at_) / kWindow;
            }
        }
        if (sweep_at_ == sweep_end_) {
            free_tenants_.insert(free_tenants_.end(), going_.begin(), going_.end());
            going_ = std::exchange(going_next_, {});
            sweep_at_ = 0;
            sweep_end_ = nodes_used_;
        }
    }
    if (going_.empty()) {
        drop_empty_storage();
    }
    return !going_.empty() || !dropped_.empty();
}

// Have what nobody holds any more of these blocks out of the way before they are stored anew.
void RadixTree::purge_chain(HashView hashes, std::optional<std::uint64_t> parent) {
    Purge purge(*this);
    const auto purge_one = [&](std::uint64_t key) {
        if (const Place* place = std::as_const(places_).find(key)) {
            purge.run(key, place->node);
        }
    };
    if (parent) {
        purge_one(*parent);
    }
    for (std::size_t i = 0; i < hashes.size(); ++i) {
        purge_one(hashes[i]);
    }
}

void RadixTree::drop_empty_storage() {
    if (places_.size() != 0 || nodes_used_ == 0) {
        return;
    }
    for (auto& part : places_.clear()) {
        dropped_.push_back(std::move(part));
    }
    for (auto& part : nodes_.clear()) {
        dropped_.push_back(std::move(part));
    }
    nodes_used_ = 0;
    free_nodes_ = kNone;
    hubs_.clear();
    leaves_ = std::vector<Leaf>();
    leaves_until_ = 0;
    leaves_complete_ = true;
    leaves_at_ = 0;
}

}  // namespace penstock
