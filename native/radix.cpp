// Three ideas make this small and fast. Blocks that are held alike share one set of holders, so that a block costs a
// place in the map (key, node, set) and a node, and a match compares sets by their ids. A hash names its whole prefix,
// so that a match asks for the last block first and then bisects; only workers with holes are walked block by block.
// And the order of eviction is worked out when something has to go, from the stamps, a batch at a time.

#include "radix.hpp"

#include <algorithm>
#include <string>

namespace penstock {
namespace {

constexpr std::size_t kWindow = 16; // blocks whose cache lines are fetched side by side

}  // namespace

// ---- Changes

// One more or one less copy of each block on one worker: blocks that were held alike will be so again, and the
// change of their set is worked out once.
class RadixTree::Transition {
  public:
    Transition(HoldersTable& table, std::uint32_t tenant, std::size_t tier, bool stores)
        : table_(table), tier_(tier), stores_(stores), before_(tenant), after_(tenant) {}
    Transition(const Transition&) = delete;
    Transition& operator=(const Transition&) = delete;

    ~Transition() {
        table_.release(from_);
        table_.release(to_);
    }

    // Look at a block's holders; gives whether there is something to change.
    bool starts_at(HoldersId from) {
        if (from != from_ || !started_) {
            const HoldersId old_from = std::exchange(from_, from);
            const HoldersId old_to = to_;
            before_ = table_.find(from, before_.worker());
            changes_ = stores_ || before_.copies(tier_) > 0;
            after_ = !changes_ ? before_ : stores_ ? before_.more(tier_) : before_.less(tier_);
            to_ = changes_ ? table_.with(from, after_) : from;
            table_.retain(from_); // their ids mean the same as long as this looks at them
            table_.retain(to_);
            table_.release(old_from);
            table_.release(old_to);
            started_ = true;
        }
        return changes_;
    }

    // Give the block its new holders.
    void apply(HoldersId& holders) {
        table_.retain(to_);
        table_.release(holders);
        holders = to_;
    }

    Holding before() const { return before_; }
    Holding after() const { return after_; }

  private:
    HoldersTable& table_;
    std::size_t tier_;
    bool stores_;
    bool started_ = false;
    bool changes_ = false;
    HoldersId from_ = HoldersTable::kNobody;
    HoldersId to_ = HoldersTable::kNobody;
    Holding before_;
    Holding after_;
};

RadixTree::RadixTree(std::size_t pairs_max, std::uint32_t num_slots, RadixLimits limits)
    : pairs_max_(pairs_max), limits_(limits) {
    grow(num_slots);
}

void RadixTree::grow(std::uint32_t num_slots) {
    if (num_slots > kSlotsMax) {
        throw std::length_error("num_slots: must be <= " + std::to_string(kSlotsMax) + ", got " +
                                std::to_string(num_slots) + "; divide the workers among several trees");
    }
    while (tenant_of_.size() < num_slots) {
        tenant_of_.push_back(new_tenant(static_cast<std::uint32_t>(tenant_of_.size())));
    }
}

void RadixTree::share(std::uint32_t worker, std::vector<std::uint32_t> sources) {
    std::ranges::sort(sources);
    sources.erase(std::unique(sources.begin(), sources.end()), sources.end());
    grow_to_hold(worker);
    if (!sources.empty()) {
        grow_to_hold(sources.back());
    }
    const auto is_both = [&](std::uint32_t source) { return source == worker || has_sources(source); };
    if (!sources.empty() && (is_source(worker) || std::ranges::any_of(sources, is_both))) {
        throw std::invalid_argument("sources: a slot is shared by workers or loads what others share, not both, got " +
                                    std::to_string(sources.front()) + " for " + std::to_string(worker));
    }
    sources_.resize(num_slots());
    loaders_.resize(num_slots());
    for (const std::uint32_t source : sources_[worker]) {
        std::erase(loaders_[source], worker);
    }
    for (const std::uint32_t source : sources) {
        loaders_[source].push_back(worker);
    }
    std::erase(sharers_, worker);
    if (!sources.empty()) {
        sharers_.insert(std::ranges::lower_bound(sharers_, worker), worker);
    }
    sources_[worker] = std::move(sources);
}

void RadixTree::grow_to_hold(std::uint32_t worker) {
    if (worker >= kSlotsMax) {
        throw std::length_error("worker: must be a slot from 0 to " + std::to_string(kSlotsMax - 1) + ", got " +
                                std::to_string(worker) + "; give each worker the lowest number that is free");
    }
    grow(worker + 1);
}

RadixStats RadixTree::stats() const {
    const std::size_t bytes = places_.bytes() + holders_.bytes() + nodes_.bytes() +
                              tenants_.capacity() * sizeof(Tenant) + leaves_.capacity() * sizeof(Leaf);
    return {nodes_held_, pairs_, evicted_pairs_, unknown_removals_, contradictions_, bytes};
}

void RadixTree::store(std::uint32_t worker, HashView hashes, std::optional<std::uint64_t> parent, std::size_t tier) {
    grow_to_hold(worker);
    if (hashes.size() == 0) {
        return;
    }
    if (!going_.empty()) {
        purge_chain(hashes, parent);
    }
    const std::uint32_t tenant = tenant_of_[worker];
    const std::uint32_t stamp = tick();
    const Place told_first = parent ? find_or_add_place(*parent) : Place{};
    NodeId told = told_first.node;
    bool told_held = holders_.contains(told_first.holders, tenant);
    {
        Transition transition(holders_, tenant, tier, true);
        for (std::size_t begin = 0; begin < hashes.size(); begin += kWindow) {
            const std::size_t count = std::min(kWindow, hashes.size() - begin);
            for (std::size_t i = 0; i < count; ++i) {
                places_.reserve(hashes[begin + i], kWindow);
                places_.prefetch(hashes[begin + i]);
            }
            std::array<Place*, kWindow> places;
            for (std::size_t i = 0; i < count; ++i) {
                places[i] = places_.find(hashes[begin + i]);
                if (places[i] != nullptr) {
                    __builtin_prefetch(&node(places[i]->node));
                }
            }
            for (std::size_t i = 0; i < count; ++i) {
                const std::uint64_t key = hashes[begin + i];
                Place& place = places[i] != nullptr ? *places[i] : places_.find_or_insert(key);
                if (place.vacant()) {
                    place.node = new_node(key);
                }
                const NodeId id = place.node;
                if (place.holders == HoldersTable::kNobody) {
                    ++nodes_held_;
                    link(id, told);
                } else if (node(id).parent != told) {
                    note_contradiction(tenant, place.holders);
                }
                node(id).stamp = stamp;
                transition.starts_at(place.holders);
                transition.apply(place.holders);
                if (!transition.before().has_copies()) {
                    add_pair(tenant, id, told_held && node(id).parent == told);
                }
                count_lower(tenant, transition.before(), transition.after());
                told = id;
                told_held = true;
            }
        }
    }
    if (parent && node(told_first.node).stamp == 0 && node(told_first.node).first_child == kNone) {
        free_node(told_first.node);
    }
    evict();
    if (!going_.empty()) {
        reclaim(2 * hashes.size()); // so that what is to be reclaimed has a bound, whatever else is called
    }
}

void RadixTree::remove(std::uint32_t worker, HashView hashes, std::size_t tier) {
    grow_to_hold(worker);
    const std::uint32_t tenant = tenant_of_[worker];
    const std::size_t count = hashes.size();
    for (std::size_t i = 0; i < std::min(kWindow, count); ++i) {
        places_.prefetch(hashes[i]);
    }
    const bool last_first = is_chain(hashes);
    const auto key_at = [&](std::size_t i) { return hashes[last_first ? count - 1 - i : i]; };
    Transition transition(holders_, tenant, tier, false);
    for (std::size_t begin = 0; begin < count; begin += kWindow) {
        const std::size_t end = std::min(begin + kWindow, count);
        for (std::size_t i = begin; i < end; ++i) {
            places_.prefetch(key_at(i));
        }
        for (std::size_t i = begin; i < end; ++i) {
            if (const Place* place = std::as_const(places_).find(key_at(i))) {
                __builtin_prefetch(&node(place->node));
            }
        }
        for (std::size_t i = begin; i < end; ++i) {
            Place* place = places_.find(key_at(i));
            if (place == nullptr || !transition.starts_at(place->holders)) {
                ++unknown_removals_;
                continue;
            }
            transition.apply(place->holders);
            const bool forgotten = place->holders == HoldersTable::kNobody;
            const NodeId id = place->node;
            if (!transition.after().has_copies()) {
                drop_pair(tenant, id);
            }
            count_lower(tenant, transition.before(), transition.after());
            if (forgotten) {
                forget(id);
            }
        }
    }
}

// Whether they come as they are stored. Removing the last one first opens no holes on the way.
bool RadixTree::is_chain(HashView hashes) const {
    if (hashes.size() < 2) {
        return false;
    }
    const Place* first = places_.find(hashes[0]);
    const Place* second = places_.find(hashes[1]);
    return first != nullptr && second != nullptr && node(second->node).parent == first->node;
}

void RadixTree::add_pair(std::uint32_t tenant_id, NodeId id, bool parent_held) {
    Tenant& tenant = tenants_[tenant_id];
    ++pairs_;
    ++tenant.held;
    const NodeId parent = node(id).parent;
    if (parent != id) {
        count_child(parent, tenant_id, true);
    }
    const bool is_hole = !parent_held && parent != kNone && !holds(tenant_id, parent);
    const std::uint32_t filled = tenant.holes > 0 ? held_children(tenant_id, id) : 0;
    if (is_hole || filled > 0) {
        set_irregular(tenant, tenant.holes + is_hole - filled, tenant.contradicted);
    }
}

void RadixTree::drop_pair(std::uint32_t tenant_id, NodeId id) {
    Tenant& tenant = tenants_[tenant_id];
    --pairs_;
    --tenant.held;
    const NodeId parent = node(id).parent;
    if (parent != id) {
        count_child(parent, tenant_id, false);
    }
    const bool was_hole = tenant.holes > 0 && parent != kNone && parent != id && !holds(tenant_id, parent);
    const std::uint32_t opened = held_children(tenant_id, id);
    if (was_hole || opened > 0) {
        set_irregular(tenant, tenant.holes - was_hole + opened, tenant.contradicted);
    }
}

void RadixTree::set_irregular(Tenant& tenant, std::uint32_t holes, bool contradicted) {
    irregular_workers_ -= tenant.irregular();
    tenant.holes = holes;
    tenant.contradicted = contradicted;
    irregular_workers_ += tenant.irregular();
}

void RadixTree::count_lower(std::uint32_t tenant, Holding before, Holding after) {
    const bool was = before.has_copies() && before.best_tier() != 0;
    const bool is = after.has_copies() && after.best_tier() != 0;
    if (was != is) {
        const std::uint32_t change = is ? 1 : UINT32_MAX; // that is, plus or minus one
        tenants_[tenant].lower += change;
        lower_pairs_ = is ? lower_pairs_ + 1 : lower_pairs_ - 1;
    }
}

// A hash names its prefix, so two parents are an engine's error. Who is right is not known: all are walked.
void RadixTree::note_contradiction(std::uint32_t tenant_id, HoldersId holders) {
    ++contradictions_;
    set_irregular(tenants_[tenant_id], tenants_[tenant_id].holes, true);
    for (const std::uint64_t entry : holders_.entries(holders)) {
        if (!is_gone(entry)) {
            Tenant& holder = tenants_[worker_of(entry)];
            set_irregular(holder, holder.holes, true);
        }
    }
}

}  // namespace penstock
