// The prefix index as a tree: its nodes, who holds them, and how they hang together.

#include "radix.hpp"

#include <algorithm>

namespace penstock {

bool RadixTree::holds(std::uint32_t tenant, NodeId id) const {
    return holders_.contains(holders_of(node(id).key()), tenant);
}

std::uint32_t RadixTree::num_children(NodeId id) const {
    const NodeId first = node(id).first_child;
    return first == kNone ? 0 : node(first).previous;
}

std::uint32_t RadixTree::held_children(std::uint32_t tenant, NodeId id) const {
    if (is_hub(id)) {
        const std::vector<Share>& shares = hubs_.at(id);
        const auto at = std::ranges::lower_bound(shares, tenant, {}, &Share::tenant);
        return at != shares.end() && at->tenant == tenant ? at->children : 0;
    }
    std::uint32_t count = 0;
    for (NodeId child = node(id).first_child; child != kNone; child = node(child).next) {
        count += child != id && holds(tenant, child);
    }
    return count;
}

RadixTree::NodeId RadixTree::new_node(std::uint64_t key) {
    NodeId id = free_nodes_;
    if (id != kNone) {
        free_nodes_ = node(id).next;
    } else {
        id = nodes_used_++;
        nodes_.grow(nodes_used_);
    }
    node(id) = {static_cast<std::uint32_t>(key), static_cast<std::uint32_t>(key >> 32), kNone, kNone, kNone, kNone, 0};
    return id;
}

RadixTree::Place RadixTree::find_or_add_place(std::uint64_t key) {
    Place& place = places_.find_or_insert(key);
    if (place.vacant()) {
        place.node = new_node(key);
    }
    return place;
}

void RadixTree::free_node(NodeId id) {
    places_.erase(node(id).key());
    node(id).stamp = 0;
    node(id).next = free_nodes_;
    free_nodes_ = id;
}

void RadixTree::link(NodeId child_id, NodeId parent_id) {
    if (parent_id == kNone) {
        return;
    }
    Node& child = node(child_id);
    Node& parent = node(parent_id);
    child.parent = parent_id;
    child.previous = num_children(parent_id) + 1;
    child.next = parent.first_child;
    if (child.next != kNone) {
        node(child.next).previous = child_id;
    }
    parent.first_child = child_id;
    if (child.previous == limits_.hub_children && !hubs_.contains(parent_id)) {
        make_hub(parent_id);
    }
}

void RadixTree::unlink(NodeId child_id) {
    Node& child = node(child_id);
    const NodeId parent_id = child.parent;
    if (parent_id == kNone) {
        return;
    }
    Node& parent = node(parent_id);
    const std::uint32_t left = num_children(parent_id) - 1;
    if (parent.first_child == child_id) {
        parent.first_child = child.next;
    } else {
        node(child.previous).next = child.next;
        if (child.next != kNone) {
            node(child.next).previous = child.previous;
        }
    }
    if (parent.first_child != kNone) {
        node(parent.first_child).previous = left;
    }
    child.parent = kNone;
    if (left == limits_.hub_children / 2) {
        hubs_.erase(parent_id);
    }
    if (parent.first_child == kNone) {
        if (parent.stamp == 0) {
            free_node(parent_id);
        } else {
            push_leaf(parent_id);
        }
    }
}

// Whether shares of its children are counted, so that nobody needs to go through them.
bool RadixTree::is_hub(NodeId id) const {
    const std::uint32_t children = num_children(id);
    return children >= limits_.hub_children || (children > limits_.hub_children / 2 && hubs_.contains(id));
}

void RadixTree::make_hub(NodeId id) {
    std::unordered_map<std::uint32_t, std::uint32_t> counts;
    for (NodeId child = node(id).first_child; child != kNone; child = node(child).next) {
        if (child != id) {
            for (const std::uint64_t entry : holders_.entries(holders_of(node(child).key()))) {
                ++counts[worker_of(entry)];
            }
        }
    }
    std::vector<Share>& shares = hubs_[id];
    for (const auto& [tenant, children] : counts) {
        shares.push_back({tenant, children});
    }
    std::ranges::sort(shares, {}, &Share::tenant);
}

// Take note that a tenant has come to hold, or holds no more, one of a node's children that has this parent.
void RadixTree::count_child(NodeId parent, std::uint32_t tenant, bool is_more) {
    if (parent == kNone || !is_hub(parent)) {
        return;
    }
    std::vector<Share>& shares = hubs_.at(parent);
    const auto at = std::ranges::lower_bound(shares, tenant, {}, &Share::tenant);
    const bool is_there = at != shares.end() && at->tenant == tenant;
    if (is_more && !is_there) {
        shares.insert(at, {tenant, 1});
    } else if (is_more) {
        ++at->children;
    } else if (--at->children == 0) {
        shares.erase(at);
    }
}

// The last holder of a block has left.
void RadixTree::forget(NodeId id) {
    --nodes_held_;
    unlink(id);
    if (node(id).first_child == kNone) {
        free_node(id);
    } else {
        node(id).stamp = 0;
    }
}

}  // namespace penstock
