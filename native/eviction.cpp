#include "eviction.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace penstock {
namespace {

constexpr std::uint8_t kDefaultRank = 8;  // of priority 0
constexpr double kForever = std::numeric_limits<double>::infinity();
constexpr std::size_t kGhostsPerBlock = 4;

}  // namespace

PolicyKind policy_named(std::string_view name) {
    if (name == "lru") {
        return PolicyKind::kLru;
    }
    if (name == "seconds") {
        return PolicyKind::kSeconds;
    }
    throw std::invalid_argument("policy: must be lru or seconds, got " + std::string(name));
}

// ---- Ghosts

std::optional<Ghosts::Ghost> Ghosts::put(const Ghost& ghost) {
    std::optional<Ghost> dropped;
    if (ring_.size() < most_) {
        next_ = ring_.size();
        ring_.emplace_back();
    } else if (ring_[next_].is_kept) {
        dropped = ring_[next_];
        index_.erase(dropped->hash, static_cast<BlockId>(next_));
    }
    ring_[next_] = ghost;
    ring_[next_].is_kept = true;
    index_.insert(ghost.hash, static_cast<BlockId>(next_));
    next_ = (next_ + 1) % most_;
    return dropped;
}

std::optional<Ghosts::Ghost> Ghosts::take(Hash hash) {
    const BlockId found = index_.find(hash, [&](BlockId at) { return ring_[static_cast<std::size_t>(at)].hash; });
    if (found < 0) {
        return std::nullopt;
    }
    index_.erase(hash, found);
    Ghost& ghost = ring_[static_cast<std::size_t>(found)];
    ghost.is_kept = false;
    return ghost;
}

void Ghosts::clear() {
    ring_.clear();
    next_ = 0;
    index_.clear();
}

// ---- What happens to blocks

Eviction::Eviction(std::size_t num_blocks, std::size_t block_size, PrefillPrice price)
    : num_blocks_(num_blocks), block_size_(block_size), price_(price), ranks_(kNumRanks), reuse_(num_blocks),
      ghosts_(kGhostsPerBlock * num_blocks) {}

Eviction::Meta& Eviction::meta(BlockId id) {
    if (at(id) >= metas_.size()) {
        metas_.resize(at(id) + 1);
    }
    return metas_[at(id)];
}

void Eviction::commit(BlockId id, Hash hash, std::int32_t depth) {
    Meta& block = meta(id);
    block = Meta{};
    block.last = now_;
    block.depth = depth;
    block.rank = kDefaultRank;
    block.segment = class_of(block, 0);
    if (const auto ghost = ghosts_.take(hash)) {
        block.segment = ghost->segment;
        block.uses = ghost->uses;
        block.last = ghost->last;
        block.watched = ghost->watched;
        block.unused = now_ - ghost->last;
    }
}

std::uint16_t Eviction::class_of(const Meta& block, std::size_t kind) const {
    return static_cast<std::uint16_t>(
        ReuseTable::class_of(block.uses, static_cast<std::uint64_t>(block.depth) * block_size_, kind));
}

void Eviction::use(BlockId id, const BlockUse& use) {
    Meta& block = metas_[at(id)];
    if (block.uses > 0) {
        reuse_.add(block.segment, block.watched, block.unused, true);
    }
    ++block.uses;
    block.unused = 0;
    block.watched = 0;
    block.last = now_;
    block.order = ++order_;
    block.segment = class_of(block, use.kind);
    const auto rank = static_cast<std::uint8_t>(kDefaultRank + use.priority);
    if (rank >= block.rank || block.until_s == kForever) {
        block.rank = rank;
        block.until_s = use.until_s;
        if (use.until_s < kForever) {
            deadlines_.push({use.until_s, id});
            if (deadlines_.size() > 2 * num_blocks_ + 64) {  // of blocks used again since
                decltype(deadlines_) rest;
                for (std::size_t index = 0; index < metas_.size(); ++index) {
                    if (metas_[index].until_s < kForever) {
                        rest.push({metas_[index].until_s, static_cast<BlockId>(index)});
                    }
                }
                deadlines_.swap(rest);
            }
        }
    }
}

void Eviction::hold(BlockId id) {
    Meta& block = metas_[at(id)];
    block.unused = now_ - block.last;
}

void Eviction::evicted(BlockId id, Hash hash) {
    Meta& block = metas_[at(id)];
    ++now_;
    block.until_s = kForever;
    if (block.uses > 0) {
        const std::size_t watched = reuse_.add(block.segment, block.watched, now_ - block.last, false);
        const auto octaves = static_cast<std::uint8_t>(watched);
        if (const auto dropped = ghosts_.put({hash, block.last, block.uses, block.segment, octaves, true})) {
            reuse_.add(dropped->segment, dropped->watched, now_ - dropped->last, false);
        }
    }
}

void Eviction::forgotten(BlockId id) { metas_[at(id)].until_s = kForever; }

void Eviction::reset() {
    metas_.clear();
    ranks_.assign(kNumRanks, Rank{});
    deadlines_ = {};
    ghosts_.clear();
}

void Eviction::expire(double now_s, std::size_t most) {
    while (most > 0 && !deadlines_.empty() && deadlines_.top().until_s <= now_s) {
        const auto [until_s, id] = deadlines_.top();
        deadlines_.pop();
        if (at(id) >= metas_.size() || metas_[at(id)].until_s != until_s) {
            continue;
        }
        --most;
        Meta& block = metas_[at(id)];
        const bool is_leaf = block.place != kNoPlace;
        if (is_leaf) {
            remove_leaf(id);
        }
        block.until_s = kForever;
        block.rank = kDefaultRank;
        if (is_leaf) {
            add_leaf(id);
        }
    }
}

// ---- Leaves

void Eviction::add_leaf(BlockId id) {
    Meta& block = metas_[at(id)];
    if (block.order == 0) {  // no request used it
        block.order = ++order_;
    }
    Rank& rank = ranks_[block.rank];
    if (rank.segments.empty()) {
        rank.segments.resize(ReuseTable::kClasses);
        rank.where.assign(ReuseTable::kClasses, kNoPlace);
    }
    Heap& heap = rank.segments[block.segment];
    if (heap.empty()) {
        rank.where[block.segment] = static_cast<std::int32_t>(rank.filled.size());
        rank.filled.push_back(block.segment);
    }
    heap.emplace_back();
    sift(heap, heap.size() - 1, {block.order, id});
    ++rank.num_leaves;
}

void Eviction::remove_leaf(BlockId id) {
    Meta& block = metas_[at(id)];
    Rank& rank = ranks_[block.rank];
    Heap& heap = rank.segments[block.segment];
    const auto index = static_cast<std::size_t>(block.place);
    block.place = kNoPlace;
    const Leaf last = heap.back();
    heap.pop_back();
    if (index < heap.size()) {
        sift(heap, index, last);
    }
    if (heap.empty()) {
        const std::int32_t gap = rank.where[block.segment];
        const std::uint16_t moved = rank.filled.back();
        rank.filled[static_cast<std::size_t>(gap)] = moved;
        rank.where[moved] = gap;
        rank.where[block.segment] = kNoPlace;
        rank.filled.pop_back();
    }
    --rank.num_leaves;
}

void Eviction::place(Heap& heap, std::size_t index, Leaf leaf) {
    heap[index] = leaf;
    metas_[at(leaf.id)].place = static_cast<std::int32_t>(index);
}

// Put a leaf where it belongs, from a place that is free.
void Eviction::sift(Heap& heap, std::size_t index, Leaf leaf) {
    while (index > 0 && leaf < heap[(index - 1) / 2]) {
        place(heap, index, heap[(index - 1) / 2]);
        index = (index - 1) / 2;
    }
    for (std::size_t child = 2 * index + 1; child < heap.size(); child = 2 * index + 1) {
        if (child + 1 < heap.size() && heap[child + 1] < heap[child]) {
            ++child;
        }
        if (!(heap[child] < leaf)) {
            break;
        }
        place(heap, index, heap[child]);
        index = child;
    }
    place(heap, index, leaf);
}

// ---- The keys

std::optional<BlockId> Eviction::victim() {
    const auto rank = std::ranges::find_if(ranks_, [](const Rank& each) { return each.num_leaves > 0; });
    if (rank == ranks_.end()) {
        return std::nullopt;
    }
    const Leaf* first = nullptr;
    double least = 0.0;
    for (const std::uint16_t segment : rank->filled) {
        const Leaf& leaf = rank->segments[segment].front();
        const double key = score(leaf.id);
        if (first == nullptr || key < least || (key == least && leaf.order < first->order)) {
            first = &leaf;
            least = key;
        }
    }
    return first->id;
}

std::tuple<std::uint8_t, double, std::uint64_t> Eviction::standing(BlockId id) const {
    const Meta& block = metas_[at(id)];
    return {block.rank, score(id), block.order};
}

// Expected seconds lost for each eviction that the block would stay.
double Eviction::score(BlockId id) const {
    const Meta& block = metas_[at(id)];
    return reuse_.index(block.segment, now_ - block.last) * weight(block.depth);
}

// Mean seconds of a token up to that depth: if the prefix goes, all its blocks go, and not only the dearest last one.
double Eviction::weight(std::int32_t depth) const {
    const double before = static_cast<double>(depth) * static_cast<double>(block_size_);
    return std::min(price_.load_s, price_.token_s + price_.deeper_s * before * 0.5);
}

void Eviction::check() const {
    std::size_t num_placed = 0;
    for (const Rank& rank : ranks_) {
        std::size_t num_leaves = 0;
        for (const Heap& heap : rank.segments) {
            for (std::size_t index = 0; index < heap.size(); ++index) {
                const Meta& block = metas_[at(heap[index].id)];
                if (block.place != static_cast<std::int32_t>(index) || &rank.segments[block.segment] != &heap ||
                    &ranks_[block.rank] != &rank || (index > 0 && heap[index] < heap[(index - 1) / 2])) {
                    throw std::logic_error("a heap of leaves is out of order");
                }
            }
            num_leaves += heap.size();
        }
        if (num_leaves != rank.num_leaves) {
            throw std::logic_error("leaves are counted wrong");
        }
        num_placed += num_leaves;
    }
    for (const Meta& block : metas_) {
        num_placed -= block.place != kNoPlace;
    }
    if (num_placed != 0) {
        throw std::logic_error("a leaf is in no heap");
    }
}

}  // namespace penstock
