// The prefix index as a tree: its nodes, who holds them, and how they hang together.

#include "radix.hpp"

namespace penstock {

bool RadixTree::holds(std::uint32_t worker, NodeId id) const {
    return holders_.contains(holders_of(node(id).key()), worker);
}

std::uint32_t RadixTree::held_children(std::uint32_t worker, NodeId id) const {
    std::uint32_t count = 0;
    for (NodeId child = node(id).first_child; child != kNone; child = node(child).next) {
        count += child != id && holds(worker, child);
    }
    return count;
}

RadixTree::NodeId RadixTree::new_node(std::uint64_t key) {
    NodeId id = free_nodes_;
    if (id != kNone) {
        free_nodes_ = node(id).next;
    } else {
        id = nodes_used_++;
        if (id / kChunkNodes == chunks_.size()) {
            chunks_.push_back(std::make_unique_for_overwrite<Node[]>(kChunkNodes));
        }
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
    child.previous = kNone;
    child.next = parent.first_child;
    if (child.next != kNone) {
        node(child.next).previous = child_id;
    }
    parent.first_child = child_id;
}

void RadixTree::unlink(NodeId child_id) {
    Node& child = node(child_id);
    const NodeId parent_id = child.parent;
    if (parent_id == kNone) {
        return;
    }
    Node& parent = node(parent_id);
    (child.previous == kNone ? parent.first_child : node(child.previous).next) = child.next;
    if (child.next != kNone) {
        node(child.next).previous = child.previous;
    }
    child.parent = kNone;
    if (parent.first_child == kNone) {
        if (parent.stamp == 0) {
            free_node(parent_id);
        } else {
            push_leaf(parent_id);
        }
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
