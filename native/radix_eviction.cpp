// What goes when the prefix index is full: the leaf that was stored or matched longest ago.

#include "radix.hpp"

#include <algorithm>
#include <functional>

namespace penstock {

std::uint32_t RadixTree::tick() {
    if (clock_ >= limits_.clock_max) {
        renumber_stamps();
    }
    return ++clock_;
}

void RadixTree::renumber_stamps() {
    std::vector<std::uint32_t> stamps;
    places_.for_each([&](std::uint64_t, const Place& place) { stamps.push_back(node(place.node).stamp); });
    stamps.push_back(0);
    std::ranges::sort(stamps);
    const auto [end, _] = std::ranges::unique(stamps);
    stamps.erase(end, stamps.end());
    places_.for_each([&](std::uint64_t, const Place& place) {
        std::uint32_t& stamp = node(place.node).stamp;
        stamp = static_cast<std::uint32_t>(std::ranges::lower_bound(stamps, stamp) - stamps.begin());
    });
    clock_ = static_cast<std::uint32_t>(stamps.size());
    leaves_.clear();
    leaves_until_ = 0;
}

void RadixTree::evict() {
    while (pairs_ > pairs_max_) {
        Place& place = *places_.find(oldest_leaf());
        const NodeId id = place.node;
        const HoldersId holders = std::exchange(place.holders, HoldersTable::kNobody);
        for (const std::uint64_t entry : holders_.entries(holders)) {
            const Holding holding(entry);
            drop_pair(holding.worker(), id);
            count_lower(holding.worker(), holding, Holding(holding.worker()));
            ++evicted_pairs_;
        }
        holders_.release(holders);
        forget(id);
    }
}

std::uint64_t RadixTree::oldest_leaf() {
    for (bool gathered = false;; gathered = true) {
        while (!leaves_.empty()) {
            std::ranges::pop_heap(leaves_, std::greater{});
            const Leaf leaf = leaves_.back();
            leaves_.pop_back();
            const Place* place = places_.find(leaf.key);
            if (place != nullptr && place->holders != HoldersTable::kNobody &&
                node(place->node).stamp == leaf.stamp && node(place->node).first_child == kNone) {
                return leaf.key;
            }
        }
        if (gathered) {
            break;
        }
        gather_leaves();
    }
    Leaf oldest{UINT32_MAX, UINT64_MAX}; // parents that go in a circle: a worker told nonsense
    places_.for_each([&](std::uint64_t key, const Place& place) {
        if (place.holders != HoldersTable::kNobody) {
            oldest = std::min(oldest, Leaf{node(place.node).stamp, key});
        }
    });
    return oldest.key;
}

// Find the oldest leaves, a small part of all: one walk over the tree then serves that many evictions.
void RadixTree::gather_leaves() {
    constexpr std::size_t kPart = 16;
    for (NodeId id = 0; id < nodes_used_; ++id) {
        const Node& here = node(id);
        if (here.stamp != 0 && here.first_child == kNone) {
            leaves_.push_back({here.stamp, here.key()});
        }
    }
    const std::size_t wanted = std::max(leaves_.size() / kPart, limits_.leaves_min);
    if (wanted < leaves_.size()) {
        std::ranges::nth_element(leaves_, leaves_.begin() + static_cast<std::ptrdiff_t>(wanted));
        leaves_until_ = leaves_[wanted].stamp;
        std::erase_if(leaves_, [&](const Leaf& leaf) { return leaf.stamp > leaves_until_; });
        leaves_.shrink_to_fit();
    } else {
        leaves_until_ = clock_;
    }
    std::ranges::make_heap(leaves_, std::greater{});
}

void RadixTree::push_leaf(NodeId id) {
    if (node(id).stamp > leaves_until_) {
        return;
    }
    if (leaves_.size() > nodes_held_ + limits_.leaves_min) { // stale ones: start anew when the next leaf has to go
        leaves_ = std::vector<Leaf>();
        leaves_until_ = 0;
        return;
    }
    leaves_.push_back({node(id).stamp, node(id).key()});
    std::ranges::push_heap(leaves_, std::greater{});
}

}  // namespace penstock
