// The leaves of a pool, idle blocks that are no idle block's parent, and which of them is evicted next.
#include "pool.hpp"

#include <optional>

namespace penstock {
namespace {

constexpr std::size_t kTenantLeaves = 32;  // of a tenant past its share: so many are compared for a victim

}  // namespace

BlockId Pool::victim() {
    if (const auto id = victim_of_tenant()) {
        return *id;
    }
    // Without a leaf the parents lead in a circle: no chain of hashes does, but callers may err.
    return eviction_ ? eviction_->victim().value_or(first_idle_) : first_idle_;
}

// Of a few leaves of a tenant past its share the one that goes first by the policy. The others go to the end of the
// tenant's list: so each victim is the first of a fresh sample.
std::optional<BlockId> Pool::victim_of_tenant() {
    std::optional<BlockId> first = tenants_ ? tenants_->first_over() : std::nullopt;
    if (!first || !eviction_) {
        return first;
    }
    BlockId last = *first;
    auto least = eviction_->standing(last);
    std::size_t left = kTenantLeaves;
    for (auto next = tenants_->after(last); next && --left > 0; next = tenants_->after(last)) {
        last = *next;
        if (const auto standing = eviction_->standing(last); standing < least) {
            least = standing;
            first = last;
        }
    }
    tenants_->rotate(last);
    return first;
}

void Pool::add_leaf(BlockId id) {
    eviction_->add_leaf(id);
    if (tenants_) {
        tenants_->add_leaf(id);
    }
}

void Pool::remove_leaf(BlockId id) {
    eviction_->remove_leaf(id);
    if (tenants_) {
        tenants_->remove_leaf(id);
    }
}

void Pool::enter_cache(BlockId id, const Block& block) {
    const Node* parent = block.has_parent ? nodes_.find(block.parent) : nullptr;
    const std::int32_t depth = parent != nullptr && parent->num_cached > 0 ? parent->depth + 1 : 0;
    Node& node = nodes_.find_or_insert(block.hash.low);
    ++node.num_cached;
    node.depth = depth;
    eviction_->commit(id, block.hash, depth);
}

void Pool::leave_cache(const Block& block) {
    Node& node = *nodes_.find(block.hash.low);
    if (node.num_cached == 1 && node.idle_children == 0) {
        nodes_.erase(block.hash.low);
    } else {
        --node.num_cached;
    }
}

void Pool::enter_idle(BlockId id, const Block& block) {
    Node& node = *nodes_.find(block.hash.low);
    node.idle = id;
    if (node.idle_children == 0) {
        add_leaf(id);
    }
    if (block.has_parent) {
        Node& parent = nodes_.find_or_insert(block.parent);
        if (++parent.idle_children == 1 && parent.idle != kNone && eviction_->is_leaf(parent.idle)) {
            remove_leaf(parent.idle);
        }
    }
}

void Pool::leave_idle(BlockId id, const Block& block) {
    Node& node = *nodes_.find(block.hash.low);
    if (node.idle == id) {
        node.idle = kNone;
    }
    if (eviction_->is_leaf(id)) {
        remove_leaf(id);
    }
    eviction_->hold(id);
    if (block.has_parent) {
        Node& parent = *nodes_.find(block.parent);
        if (parent.idle_children == 1 && parent.idle != kNone && !eviction_->is_leaf(parent.idle)) {
            add_leaf(parent.idle);
        }
        if (parent.idle_children == 1 && parent.num_cached == 0) {
            nodes_.erase(block.parent);
        } else {
            --parent.idle_children;
        }
    }
}

}  // namespace penstock
