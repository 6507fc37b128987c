// What goes when the prefix index is full: the leaf that was stored or matched longest ago.

#include "radix.hpp"

#include <algorithm>
#include <functional>

namespace penstock {
namespace {

constexpr std::size_t kPart = 16; // of the leaves, the oldest so many-th is looked up at once

}  // namespace

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
    leaves_complete_ = true;
}

void RadixTree::evict() {
    while (pairs_ > pairs_max_) {
        Place& place = *places_.find(oldest_leaf());
        const NodeId id = place.node;
        const HoldersId holders = std::exchange(place.holders, HoldersTable::kNobody);
        for (const std::uint64_t entry : holders_.entries(holders)) {
            const Holding holding(entry);
            if (is_gone(entry)) {
                if (node(id).parent != id) {
                    count_child(node(id).parent, holding.worker(), false);
                }
                continue;
            }
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
            const Place* place = std::as_const(places_).find(leaf.key);
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
    leaves_complete_ = nodes_used_ <= limits_.nodes_looked_at;
    if (!leaves_complete_) {
        gather_some_leaves();
        return;
    }
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

// Say which stamp a small part of the leaves does not exceed, going by some of them.
std::uint32_t RadixTree::old_stamp() const {
    constexpr NodeId kSample = 4096;
    std::vector<std::uint32_t> stamps;
    for (NodeId i = 0; i < kSample; ++i) {
        const Node& here = node(static_cast<NodeId>(std::uint64_t{nodes_used_} * i / kSample));
        if (here.stamp != 0 && here.first_child == kNone) {
            stamps.push_back(here.stamp);
        }
    }
    if (stamps.empty()) {
        return clock_;
    }
    const auto at = stamps.begin() + static_cast<std::ptrdiff_t>(stamps.size() / kPart);
    std::ranges::nth_element(stamps, at);
    return *at;
}

// In a large tree, look at a part of it, which is the next one each time, and find its leaves that are old beside all
// others. A part without any is passed over: then the youngest of leaves there may be near.
void RadixTree::gather_some_leaves() {
    leaves_until_ = old_stamp();
    std::vector<Leaf> younger;
    for (NodeId looked_at = 0; looked_at < nodes_used_ && leaves_.size() < limits_.leaves_min; ++looked_at) {
        leaves_at_ = leaves_at_ + 1 < nodes_used_ ? leaves_at_ + 1 : 0;
        const Node& here = node(leaves_at_);
        if (here.stamp != 0 && here.first_child == kNone) {
            (here.stamp <= leaves_until_ ? leaves_ : younger).push_back({here.stamp, here.key()});
        }
        if (looked_at >= limits_.nodes_looked_at && leaves_.size() + younger.size() > 0) {
            break;
        }
    }
    if (leaves_.empty() && !younger.empty()) {
        const auto wanted = static_cast<std::ptrdiff_t>(younger.size() / kPart);
        std::ranges::nth_element(younger, younger.begin() + wanted);
        leaves_until_ = younger[static_cast<std::size_t>(wanted)].stamp;
        std::erase_if(younger, [&](const Leaf& leaf) { return leaf.stamp > leaves_until_; });
        leaves_.swap(younger);
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
        leaves_complete_ = true;
        return;
    }
    leaves_.push_back({node(id).stamp, node(id).key()});
    std::ranges::push_heap(leaves_, std::greater{});
}

}  // namespace penstock
