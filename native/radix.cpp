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
    Transition(HoldersTable& table, std::uint32_t worker, std::size_t tier, bool stores)
        : table_(table), tier_(tier), stores_(stores), before_(worker), after_(worker) {}
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
    if (num_slots > workers_.size()) {
        workers_.resize(num_slots);
    }
}

void RadixTree::grow_to_hold(std::uint32_t worker) {
    if (worker >= kSlotsMax) {
        throw std::length_error("worker: must be a slot from 0 to " + std::to_string(kSlotsMax - 1) + ", got " +
                                std::to_string(worker) + "; give each worker the lowest number that is free");
    }
    grow(worker + 1);
}

RadixStats RadixTree::stats() const {
    const std::size_t bytes = places_.bytes() + holders_.bytes() + chunks_.size() * kChunkNodes * sizeof(Node) +
                              workers_.capacity() * sizeof(Worker) + leaves_.capacity() * sizeof(Leaf);
    return {nodes_held_, pairs_, evicted_pairs_, unknown_removals_, contradictions_, bytes};
}

void RadixTree::store(std::uint32_t worker, HashView hashes, std::optional<std::uint64_t> parent, std::size_t tier) {
    grow_to_hold(worker);
    if (hashes.size() == 0) {
        return;
    }
    const std::uint32_t stamp = tick();
    const Place told_first = parent ? find_or_add_place(*parent) : Place{};
    NodeId told = told_first.node;
    bool told_held = holders_.contains(told_first.holders, worker);
    {
        Transition transition(holders_, worker, tier, true);
        for (std::size_t begin = 0; begin < hashes.size(); begin += kWindow) {
            const std::size_t count = std::min(kWindow, hashes.size() - begin);
            places_.reserve(count);
            for (std::size_t i = 0; i < count; ++i) {
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
                    note_contradiction(worker, place.holders);
                }
                node(id).stamp = stamp;
                transition.starts_at(place.holders);
                transition.apply(place.holders);
                if (!transition.before().has_copies()) {
                    add_pair(worker, id, told_held && node(id).parent == told);
                }
                count_lower(worker, transition.before(), transition.after());
                told = id;
                told_held = true;
            }
        }
    }
    if (parent && node(told_first.node).stamp == 0 && node(told_first.node).first_child == kNone) {
        free_node(told_first.node);
    }
    evict();
}

void RadixTree::remove(std::uint32_t worker, HashView hashes, std::size_t tier) {
    grow_to_hold(worker);
    const std::size_t count = hashes.size();
    for (std::size_t i = 0; i < std::min(kWindow, count); ++i) {
        places_.prefetch(hashes[i]);
    }
    const bool last_first = is_chain(hashes);
    const auto key_at = [&](std::size_t i) { return hashes[last_first ? count - 1 - i : i]; };
    Transition transition(holders_, worker, tier, false);
    for (std::size_t begin = 0; begin < count; begin += kWindow) {
        const std::size_t end = std::min(begin + kWindow, count);
        for (std::size_t i = begin; i < end; ++i) {
            places_.prefetch(key_at(i));
        }
        for (std::size_t i = begin; i < end; ++i) {
            if (const Place* place = places_.find(key_at(i))) {
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
                drop_pair(worker, id);
            }
            count_lower(worker, transition.before(), transition.after());
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

void RadixTree::clear(std::uint32_t worker) {
    if (worker >= workers_.size()) {
        return;
    }
    Worker& cleared = workers_[worker];
    set_irregular(cleared, 0, false);
    if (cleared.held == 0) {
        return;
    }
    pairs_ -= cleared.held;
    lower_pairs_ -= cleared.lower;
    cleared.held = cleared.lower = 0;

    const auto num_sets = static_cast<HoldersId>(holders_.num_ids());
    std::vector<HoldersId> without(num_sets); // itself where the worker is not in it
    for (HoldersId id = 0; id < num_sets; ++id) {
        without[id] = id;
        if (holders_.contains(id, worker)) {
            without[id] = holders_.with(id, Holding(worker));
            holders_.retain(id);
            holders_.retain(without[id]);
        }
    }
    std::vector<NodeId> gone;
    places_.for_each([&](std::uint64_t, Place& place) {
        const HoldersId rest = without[place.holders];
        if (rest != place.holders) {
            holders_.retain(rest);
            holders_.release(place.holders);
            place.holders = rest;
            if (rest == HoldersTable::kNobody) {
                gone.push_back(place.node);
            }
        }
    });
    for (HoldersId id = 0; id < num_sets; ++id) {
        if (without[id] != id) {
            holders_.release(id);
            holders_.release(without[id]);
        }
    }
    nodes_held_ -= gone.size();
    for (const NodeId id : gone) {
        unlink(id); // all of them, before any is freed
    }
    for (const NodeId id : gone) {
        if (node(id).first_child == kNone) {
            free_node(id);
        } else {
            node(id).stamp = 0;
        }
    }
    drop_empty_storage();
}

void RadixTree::drop_empty_storage() {
    if (places_.size() == 0) {
        places_.clear();
        chunks_ = decltype(chunks_)();
        nodes_used_ = 0;
        free_nodes_ = kNone;
        leaves_ = std::vector<Leaf>();
        leaves_until_ = 0;
    }
}

void RadixTree::add_pair(std::uint32_t worker_slot, NodeId id, bool parent_held) {
    Worker& worker = workers_[worker_slot];
    ++pairs_;
    ++worker.held;
    const NodeId parent = node(id).parent;
    const bool is_hole = !parent_held && parent != kNone && !holds(worker_slot, parent);
    const std::uint32_t filled = worker.holes > 0 ? held_children(worker_slot, id) : 0;
    if (is_hole || filled > 0) {
        set_irregular(worker, worker.holes + is_hole - filled, worker.contradicted);
    }
}

void RadixTree::drop_pair(std::uint32_t worker_slot, NodeId id) {
    Worker& worker = workers_[worker_slot];
    --pairs_;
    --worker.held;
    const NodeId parent = node(id).parent;
    const bool was_hole = worker.holes > 0 && parent != kNone && parent != id && !holds(worker_slot, parent);
    const std::uint32_t opened = held_children(worker_slot, id);
    if (was_hole || opened > 0) {
        set_irregular(worker, worker.holes - was_hole + opened, worker.contradicted);
    }
}

void RadixTree::set_irregular(Worker& worker, std::uint32_t holes, bool contradicted) {
    irregular_workers_ -= worker.irregular();
    worker.holes = holes;
    worker.contradicted = contradicted;
    irregular_workers_ += worker.irregular();
}

void RadixTree::count_lower(std::uint32_t worker, Holding before, Holding after) {
    const bool was = before.has_copies() && before.best_tier() != 0;
    const bool is = after.has_copies() && after.best_tier() != 0;
    if (was != is) {
        const std::uint32_t change = is ? 1 : UINT32_MAX; // that is, plus or minus one
        workers_[worker].lower += change;
        lower_pairs_ = is ? lower_pairs_ + 1 : lower_pairs_ - 1;
    }
}

// A hash names its prefix, so two parents are an engine's error. Who is right is not known: all are walked.
void RadixTree::note_contradiction(std::uint32_t worker, HoldersId holders) {
    ++contradictions_;
    set_irregular(workers_[worker], workers_[worker].holes, true);
    for (const std::uint64_t entry : holders_.entries(holders)) {
        Worker& holder = workers_[worker_of(entry)];
        set_irregular(holder, holder.holes, true);
    }
}

}  // namespace penstock
