// Three ideas make this small and fast. Blocks that are held alike share one set of holders, so that a block costs a
// place in the map (key, node, set) and a node, and a match compares sets by their ids. A hash names its whole prefix,
// so that a match asks for the last block first and then bisects; only workers with holes are walked block by block.
// And the order of eviction is worked out when something has to go, from the stamps, a batch at a time.

#include "radix.hpp"

#include <algorithm>
#include <functional>

namespace penstock {
namespace {

constexpr std::size_t kWindow = 16; // blocks whose cache lines are fetched side by side
constexpr std::uint32_t kStampMax = UINT32_MAX / 4 * 3; // here the clock waits for a store, which renumbers

std::uint32_t worker_of(std::uint64_t entry) { return Holding(entry).worker(); }

void require(bool holds, const char* what) {
    if (!holds) {
        throw std::logic_error(what);
    }
}

}  // namespace

// ---- HoldersTable

std::uint64_t HoldersTable::digest(Holding holding) {
    std::uint64_t x = holding.bits() + 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
}

Holding HoldersTable::find(HoldersId id, std::uint32_t worker) const {
    const std::span<const std::uint64_t> set = entries(id);
    const auto at = std::ranges::lower_bound(set, worker, {}, worker_of);
    return at != set.end() && worker_of(*at) == worker ? Holding(*at) : Holding(worker);
}

HoldersId HoldersTable::with(HoldersId id, Holding holding) {
    const std::span<const std::uint64_t> old = entries(id);
    const auto at = std::ranges::lower_bound(old, holding.worker(), {}, worker_of);
    scratch_.assign(old.begin(), at);
    std::uint64_t sum = sets_[id].digest;
    if (holding.has_copies()) {
        scratch_.push_back(holding.bits());
        sum += digest(holding);
    }
    const bool replaces = at != old.end() && worker_of(*at) == holding.worker();
    if (replaces) {
        sum -= digest(Holding(*at));
    }
    scratch_.insert(scratch_.end(), at + replaces, old.end());
    if (scratch_.empty()) {
        return kNobody;
    }

    Indexed& indexed = by_digest_.find_or_insert(sum);
    if (!indexed.vacant() && std::ranges::equal(entries(indexed.id), scratch_)) {
        return indexed.id;
    }
    HoldersId fresh;
    if (free_.empty()) {
        fresh = static_cast<HoldersId>(sets_.size());
        sets_.emplace_back();
    } else {
        fresh = free_.back();
        free_.pop_back();
    }
    if (indexed.vacant()) { // else two sets with one digest, and this one is not found again
        indexed.id = fresh;
    }
    Set& set = sets_[fresh];
    set.digest = sum;
    set.size = static_cast<std::uint32_t>(scratch_.size());
    if (set.size > 1) {
        set.many = std::make_unique_for_overwrite<std::uint64_t[]>(set.size);
        std::ranges::copy(scratch_, set.many.get());
        entries_bytes_ += set.size * sizeof(std::uint64_t);
    } else {
        set.one = scratch_.front();
    }
    return fresh;
}

void HoldersTable::release(HoldersId id) {
    Set& set = sets_[id];
    if (id == kNobody || --set.references != 0) {
        return;
    }
    const Indexed* indexed = by_digest_.find(set.digest);
    if (indexed != nullptr && indexed->id == id) {
        by_digest_.erase(set.digest);
    }
    entries_bytes_ -= set.size > 1 ? set.size * sizeof(std::uint64_t) : 0;
    set = Set{};
    free_.push_back(id);
}

std::size_t HoldersTable::bytes() const {
    return sets_.capacity() * sizeof(Set) + entries_bytes_ + by_digest_.bytes() +
           free_.capacity() * sizeof(HoldersId);
}

void HoldersTable::check(std::span<const std::uint32_t> references) const {
    std::size_t unused = 0;
    for (HoldersId id = 1; id < sets_.size(); ++id) {
        const Set& set = sets_[id];
        require(set.references == references[id], "holders: references are the blocks held so");
        require((set.size == 0) == (set.references == 0), "holders: a set is kept while a block is held so");
        unused += set.size == 0;
        const std::span<const std::uint64_t> all = entries(id);
        std::uint64_t sum = 0;
        for (std::size_t i = 0; i < all.size(); ++i) {
            require(Holding(all[i]).has_copies(), "holders: each has a copy");
            require(i == 0 || worker_of(all[i - 1]) < worker_of(all[i]), "holders: one entry a worker, in order");
            sum += digest(Holding(all[i]));
        }
        require(sum == set.digest, "holders: the digest is the sum over the entries");
    }
    require(unused == free_.size(), "holders: unused ids can be found");
}

// ---- RadixTree: changes

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
        throw std::length_error("worker slots");
    }
    if (num_slots > workers_.size()) {
        workers_.resize(num_slots);
    }
}

RadixStats RadixTree::stats() const {
    const std::size_t bytes = places_.bytes() + holders_.bytes() + chunks_.size() * kChunkNodes * sizeof(Node) +
                              workers_.capacity() * sizeof(Worker) + leaves_.capacity() * sizeof(Leaf);
    return {nodes_held_, pairs_, evicted_pairs_, unknown_removals_, contradictions_, bytes};
}

void RadixTree::store(std::uint32_t worker, HashView hashes, std::optional<std::uint64_t> parent, std::size_t tier) {
    if (worker >= kSlotsMax) {
        throw std::length_error("worker slots");
    }
    grow(worker + 1);
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
    if (worker >= kSlotsMax) {
        throw std::length_error("worker slots");
    }
    grow(worker + 1);
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

// ---- RadixTree: its shape

HoldersId RadixTree::holders_of(std::uint64_t key) const {
    const Place* place = places_.find(key);
    return place == nullptr ? HoldersTable::kNobody : place->holders;
}

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

// ---- RadixTree: the oldest leaf

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

// ---- RadixTree: reading

class RadixTree::Matching {
  public:
    Matching(const RadixTree& tree, HashView hashes, std::span<std::int32_t> depths)
        : tree_(tree), hashes_(hashes), depths_(depths) {}

    // Find the depths; gives the greatest.
    std::size_t run() {
        const std::size_t last = hashes_.size() - 1;
        tree_.places_.prefetch(hashes_[0]);
        tree_.places_.prefetch(hashes_[last]);
        tree_.places_.prefetch(hashes_[last / 2]);
        const HoldersId first_holders = at(0);
        if (first_holders == HoldersTable::kNobody) {
            return 0;
        }
        if (tree_.irregular_workers_ > 0) {
            walk_irregular(first_holders);
        }
        const HoldersId last_holders = at(last);
        settle(last, last_holders, hashes_.size(), HoldersTable::kNobody);
        settle(0, first_holders, last, last_holders);
        return deepest_;
    }

    // Count the blocks by tier that the depths found hold.
    void count_tiers(std::int32_t* tiers) const {
        const std::size_t num_slots = depths_.size();
        bool any_lower = false;
        for (const std::uint64_t entry : tree_.holders_.entries(at(0))) {
            const std::uint32_t worker = worker_of(entry);
            if (worker < num_slots) {
                const bool lower = tree_.workers_[worker].lower > 0;
                any_lower |= lower;
                tiers[worker] = lower ? 0 : depths_[worker];
            }
        }
        for (std::size_t begin = 0, end = 0; any_lower && begin < deepest_; begin = end) {
            const HoldersId holders = at(begin);
            for (end = begin + 1; end < deepest_ && at(end) == holders;) {
                ++end;
            }
            for (const std::uint64_t entry : tree_.holders_.entries(holders)) {
                const Holding holding(entry);
                const std::uint32_t worker = holding.worker();
                if (worker < num_slots && tree_.workers_[worker].lower > 0) {
                    const auto depth = static_cast<std::size_t>(depths_[worker]);
                    const std::size_t counted = std::min(depth, end) - std::min(depth, begin);
                    tiers[holding.best_tier() * num_slots + worker] += static_cast<std::int32_t>(counted);
                }
            }
        }
    }

  private:
    HoldersId at(std::size_t position) const { return tree_.holders_of(hashes_[position]); }

    void set_depth(std::uint32_t worker, std::size_t depth) {
        depths_[worker] = static_cast<std::int32_t>(depth);
        deepest_ = std::max(deepest_, depth);
    }

    bool is_searched(std::uint32_t worker) const {
        return worker < depths_.size() && (tree_.irregular_workers_ == 0 || !tree_.workers_[worker].irregular());
    }

    // Call with each searched worker that is among `some` and not among `others`, until a call gives false.
    template <class Call>
    void for_each_lost(HoldersId some, HoldersId others, const Call& call) const {
        const std::span<const std::uint64_t> rest = tree_.holders_.entries(others);
        auto other = rest.begin();
        for (const std::uint64_t entry : tree_.holders_.entries(some)) {
            const std::uint32_t worker = worker_of(entry);
            while (other != rest.end() && worker_of(*other) < worker) {
                ++other;
            }
            const bool kept = other != rest.end() && worker_of(*other) == worker;
            if (!kept && is_searched(worker) && !call(worker)) {
                return;
            }
        }
    }

    // Set the depth of the searched workers that hold the block at `low` and not the one at `high`: without holes,
    // they hold everything up to some block between.
    void settle(std::size_t low, HoldersId low_holders, std::size_t high, HoldersId high_holders) {
        if (low_holders == high_holders || low >= high) {
            return;
        }
        if (high - low == 1) {
            for_each_lost(low_holders, high_holders, [&](std::uint32_t worker) {
                set_depth(worker, high);
                return true;
            });
            return;
        }
        bool any_lost = false;
        for_each_lost(low_holders, high_holders, [&](std::uint32_t) { return !(any_lost = true); });
        if (!any_lost) { // held alike but for the copies, or by workers that are walked
            return;
        }
        const std::size_t middle = (low + high) / 2;
        tree_.places_.prefetch(hashes_[(low + middle) / 2]);
        tree_.places_.prefetch(hashes_[(middle + high) / 2]);
        const HoldersId middle_holders = at(middle);
        settle(low, low_holders, middle, middle_holders);
        settle(middle, middle_holders, high, high_holders);
    }

    void walk_irregular(HoldersId first_holders) {
        std::vector<std::uint32_t> walking;
        for (const std::uint64_t entry : tree_.holders_.entries(first_holders)) {
            const std::uint32_t worker = worker_of(entry);
            if (worker < depths_.size() && tree_.workers_[worker].irregular()) {
                walking.push_back(worker);
            }
        }
        HoldersId previous = first_holders;
        for (std::size_t position = 1; position < hashes_.size() && !walking.empty(); ++position) {
            const HoldersId holders = at(position);
            if (holders != previous) {
                std::erase_if(walking, [&](std::uint32_t worker) {
                    if (tree_.holders_.contains(holders, worker)) {
                        return false;
                    }
                    set_depth(worker, position);
                    return true;
                });
                previous = holders;
            }
        }
        for (const std::uint32_t worker : walking) {
            set_depth(worker, hashes_.size());
        }
    }

    const RadixTree& tree_;
    HashView hashes_;
    std::span<std::int32_t> depths_;
    std::size_t deepest_ = 0;
};

std::uint32_t RadixTree::claim_stamps(std::uint32_t count) const {
    const std::uint32_t now = clock_.load(std::memory_order_relaxed);
    return now < kStampMax ? clock_.fetch_add(count, std::memory_order_relaxed) + 1 : now - count + 1;
}

void RadixTree::match(HashView hashes, std::span<std::int32_t> depths, std::int32_t* tiers,
                      std::uint32_t stamp) const {
    if (hashes.size() == 0) {
        return;
    }
    Matching matching(*this, hashes, depths);
    const std::size_t deepest = matching.run();
    if (deepest == 0) {
        return;
    }
    if (tiers != nullptr) {
        matching.count_tiers(tiers);
    }
    const Node& last = node(places_.find(hashes[deepest - 1])->node);
    std::atomic_ref(const_cast<Node&>(last).stamp).store(stamp, std::memory_order_relaxed); // the one thing matches write
}

std::pair<std::vector<std::uint64_t>, std::vector<Run>> RadixTree::runs(std::uint32_t worker) const {
    std::vector<std::uint64_t> hashes;
    std::vector<Run> found;
    const std::size_t held = held_blocks(worker);
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
    std::vector<Worker> expected(workers_.size());
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
            require(holding.worker() < workers_.size(), "holders: each has a slot");
            Worker& worker = expected[holding.worker()];
            ++worker.held;
            worker.lower += holding.best_tier() != 0;
            worker.holes += here.parent != kNone && !holds(holding.worker(), here.parent);
        }
        NodeId previous = kNone;
        for (NodeId child = here.first_child; child != kNone; child = node(child).next) {
            require(node(child).parent == place.node && node(child).previous == previous,
                    "children: linked both ways");
            ++children[child];
            previous = child;
        }
        if (is_held && here.first_child == kNone && here.stamp <= leaves_until_) {
            require(std::ranges::find(leaves_, Leaf{here.stamp, key}) != leaves_.end(),
                    "leaves: the old ones can be found for eviction");
        }
    });
    std::size_t pairs = 0;
    std::size_t lower_pairs = 0;
    std::size_t irregular_workers = 0;
    for (std::size_t slot = 0; slot < workers_.size(); ++slot) {
        const Worker& worker = workers_[slot];
        require(worker.held == expected[slot].held, "workers: the blocks held are counted");
        require(worker.lower == expected[slot].lower, "workers: the blocks off the device are counted");
        require(worker.holes == expected[slot].holes, "workers: the holes are counted");
        pairs += worker.held;
        lower_pairs += worker.lower;
        irregular_workers += worker.irregular();
    }
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

}  // namespace penstock
