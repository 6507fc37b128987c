// All that the prefix index holds: for snapshots, and to check that it does not contradict itself.

#include "radix.hpp"

#include <algorithm>

namespace penstock {

std::pair<std::vector<std::uint64_t>, std::vector<Run>> RadixTree::runs(std::uint32_t slot) const {
    std::vector<std::uint64_t> hashes;
    std::vector<Run> found;
    const std::size_t held = held_blocks(slot);
    if (held == 0) {
        return {};
    }
    const std::uint32_t worker = tenant_of_[slot];
    hashes.reserve(held);
    std::vector<bool> is_done(nodes_used_);
    std::vector<NodeId> waiting;
    Holding latest(worker);
    NodeId latest_id = kNone;
    const auto say = [&](NodeId id, Holding holding) {
        const NodeId parent = node(id).parent;
        if (found.empty() || parent == kNone || parent != latest_id || holding.bits() != latest.bits()) {
            Run& run = found.emplace_back();
            if (parent != kNone) {
                run.parent = node(parent).key();
            }
            for (std::size_t tier = 0; tier < kTiers; ++tier) {
                run.copies[tier] = holding.copies(tier);
            }
        }
        hashes.push_back(node(id).key());
        found.back().end = hashes.size();
        latest = holding;
        latest_id = id;
    };
    places_.for_each([&](std::uint64_t, const Place& place) {
        if (!holders_.contains(place.holders, worker) || is_done[place.node]) {
            return;
        }
        NodeId top = place.node;
        for (std::size_t steps = 0; steps < held; ++steps) { // no more: parents may go in a circle
            const NodeId parent = node(top).parent;
            if (parent == kNone || is_done[parent] || !holds(worker, parent)) {
                break;
            }
            top = parent;
        }
        waiting.push_back(top);
        while (!waiting.empty()) {
            const NodeId id = waiting.back();
            waiting.pop_back();
            const Holding holding = holders_.find(holders_of(node(id).key()), worker);
            if (is_done[id] || !holding.has_copies()) {
                continue;
            }
            is_done[id] = true;
            say(id, holding);
            for (NodeId child = node(id).first_child; child != kNone; child = node(child).next) {
                waiting.push_back(child);
            }
        }
    });
    return {std::move(hashes), std::move(found)};
}

void RadixTree::check() const {
    std::vector<std::uint32_t> references(holders_.num_ids());
    std::vector<Tenant> expected(tenants_.size());
    std::vector<std::uint32_t> children(nodes_used_);
    std::size_t held = 0;
    places_.for_each([&](std::uint64_t key, const Place& place) {
        const Node& here = node(place.node);
        const bool is_held = place.holders != HoldersTable::kNobody;
        held += is_held;
        require(here.key() == key, "places: each leads to its node");
        require((here.stamp != 0) == is_held, "stamps: kept exactly for blocks that somebody holds");
        require(here.stamp <= clock_, "stamps: none is from the future");
        require(is_held || (here.parent == kNone && here.first_child != kNone),
                "nodes: one that nobody holds is somebody's parent and has none itself");
        ++references[place.holders];
        for (const std::uint64_t entry : holders_.entries(place.holders)) {
            const Holding holding(entry);
            require(holding.worker() < tenants_.size(), "holders: each is, or was, a tenant");
            Tenant& worker = expected[holding.worker()];
            ++worker.held;
            worker.lower += holding.best_tier() != 0;
            worker.holes += here.parent != kNone && !holds(holding.worker(), here.parent);
        }
        NodeId previous = kNone;
        std::uint32_t count = 0;
        for (NodeId child = here.first_child; child != kNone; child = node(child).next) {
            require(node(child).parent == place.node && (previous == kNone || node(child).previous == previous),
                    "children: linked both ways");
            ++children[child];
            ++count;
            previous = child;
        }
        require(num_children(place.node) == count, "children: the first one counts them");
        check_shares(place.node);
        if (leaves_complete_ && is_held && here.first_child == kNone && here.stamp <= leaves_until_) {
            require(std::ranges::find(leaves_, Leaf{here.stamp, key}) != leaves_.end(),
                    "leaves: the old ones can be found for eviction");
        }
    });
    std::size_t pairs = 0;
    std::size_t lower_pairs = 0;
    std::size_t irregular_workers = 0;
    std::size_t gone = 0;
    for (std::size_t id = 0; id < tenants_.size(); ++id) {
        const Tenant& worker = tenants_[id];
        if (worker.slot == kGone) {
            const bool is_going = std::ranges::count(going_, id) + std::ranges::count(going_next_, id) == 1;
            require(is_going != (std::ranges::count(free_tenants_, id) == 1), "tenants: gone, or to be had again");
            require(is_going || expected[id].held == 0, "tenants: nothing is left of those to be had again");
            ++gone;
            continue;
        }
        require(tenant_of_[worker.slot] == id, "tenants: each has a slot");
        require(worker.held == expected[id].held, "workers: the blocks held are counted");
        require(worker.lower == expected[id].lower, "workers: the blocks off the device are counted");
        require(worker.holes == expected[id].holes, "workers: the holes are counted");
        pairs += worker.held;
        lower_pairs += worker.lower;
        irregular_workers += worker.irregular();
    }
    check_sources();
    require(gone + num_slots() == tenants_.size(), "tenants: one has each slot");
    require(pairs == pairs_ && pairs <= pairs_max_, "pairs: counted, and within the bound");
    require(lower_pairs == lower_pairs_, "pairs: those off the device are counted");
    require(irregular_workers == irregular_workers_, "workers: the irregular ones are counted");
    require(held == nodes_held_, "nodes: those held are counted");
    places_.for_each([&](std::uint64_t, const Place& place) {
        require(children[place.node] == (node(place.node).parent != kNone), "children: in their parent's list once");
    });
    std::size_t free_nodes = 0;
    for (NodeId id = free_nodes_; id != kNone; id = node(id).next) {
        ++free_nodes;
    }
    require(places_.size() + free_nodes == nodes_used_, "nodes: each is in use or free");
    holders_.check(references);
}

void RadixTree::check_sources() const {
    std::vector<std::uint32_t> sharing;
    std::size_t num_loaders = 0;
    for (std::uint32_t slot = 0; slot < sources_.size(); ++slot) {
        num_loaders += loaders_[slot].size();
        if (!has_sources(slot)) {
            continue;
        }
        sharing.push_back(slot);
        require(!is_source(slot), "sources: who has some is none");
        for (const std::uint32_t source : sources_[slot]) {
            require(std::ranges::count(loaders_[source], slot) == 1, "sources: each knows who loads from it");
            --num_loaders;
        }
    }
    require(num_loaders == 0 && sharing == sharers_, "sources: known from both sides");
}

void RadixTree::check_shares(NodeId id) const {
    require(hubs_.contains(id) == is_hub(id), "hubs: those with many children");
    if (!is_hub(id)) {
        return;
    }
    std::vector<std::uint32_t> counts(tenants_.size());
    for (NodeId child = node(id).first_child; child != kNone; child = node(child).next) {
        if (child != id) {
            for (const std::uint64_t entry : holders_.entries(holders_of(node(child).key()))) {
                ++counts[worker_of(entry)];
            }
        }
    }
    for (const Share& share : hubs_.at(id)) {
        require(share.children != 0 && share.children == std::exchange(counts[share.tenant], 0),
                "hubs: each share is counted");
    }
    require(std::ranges::all_of(counts, [](std::uint32_t count) { return count == 0; }), "hubs: everyone has a share");
}

}  // namespace penstock
