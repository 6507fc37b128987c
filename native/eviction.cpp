#include "eviction.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace penstock {
namespace {

constexpr std::uint8_t kDefaultRank = 8;  // of priority 0
constexpr std::uint32_t kS3UsesMax = 3;
constexpr double kForever = std::numeric_limits<double>::infinity();
constexpr std::size_t kGhostsPerBlock = 4;  // of `seconds`; the queues have 1

}  // namespace

PolicyKind policy_named(std::string_view name) {
    constexpr std::array<std::string_view, 5> names = {"lru", "lfu", "arc", "s3-fifo", "seconds"};
    const auto found = std::ranges::find(names, name);
    if (found == names.end()) {
        throw std::invalid_argument("policy: must be lru, lfu, arc, s3-fifo or seconds, got " + std::string(name));
    }
    return static_cast<PolicyKind>(found - names.begin());
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

Eviction::Eviction(PolicyKind kind, std::size_t num_blocks, std::size_t block_size, PrefillPrice price)
    : kind_(kind), num_blocks_(num_blocks), block_size_(block_size), price_(price), ranks_(kNumRanks) {
    if (kind == PolicyKind::kSeconds) {
        reuse_.emplace(num_blocks);
        ghosts_.emplace(kGhostsPerBlock * num_blocks);
    } else if (kind == PolicyKind::kArc || kind == PolicyKind::kS3Fifo) {
        ghosts_.emplace(num_blocks);
    }
}

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
    enter(block, ghosts_ ? ghosts_->take(hash) : std::nullopt);
}

void Eviction::enter(Meta& block, const std::optional<Ghosts::Ghost>& ghost) {
    if (kind_ == PolicyKind::kSeconds) {
        block.segment = static_cast<std::uint16_t>(
            ReuseTable::class_of(0, static_cast<std::uint64_t>(block.depth) * block_size_, 0));
        if (ghost) {
            block.segment = ghost->segment;
            block.uses = ghost->uses;
            block.last = ghost->last;
            block.watched = ghost->watched;
            block.unused = now_ - ghost->last;
        }
    } else if (kind_ == PolicyKind::kArc || kind_ == PolicyKind::kS3Fifo) {
        if (ghost && kind_ == PolicyKind::kArc) {
            const auto ours = static_cast<double>(num_ghosts_[ghost->segment]);
            const auto others = static_cast<double>(num_ghosts_[1 - ghost->segment]);
            const double step = std::max(1.0, others / ours);
            target_ = ghost->segment == 0 ? std::min(static_cast<double>(num_blocks_), target_ + step)
                                          : std::max(0.0, target_ - step);
            --num_ghosts_[ghost->segment];
        }
        block.segment = ghost ? 1 : 0;
        ++num_cached_[block.segment];
    }
}

void Eviction::use(BlockId id, const BlockUse& use) {
    Meta& block = metas_[at(id)];
    switch (kind_) {
        case PolicyKind::kLru:
            break;
        case PolicyKind::kLfu:
            block.order = ++order_;
            block.key = floor_ + ++block.uses;
            break;
        case PolicyKind::kArc:
            block.order = ++order_;
            block.key = static_cast<double>(block.order);
            if (++block.uses > 1 && block.segment == 0) {
                --num_cached_[0];
                ++num_cached_[1];
                block.segment = 1;
            }
            break;
        case PolicyKind::kS3Fifo:
            if (block.order == 0) {
                block.order = ++order_;
                block.key = static_cast<double>(block.order);
            } else {
                block.uses = std::min(kS3UsesMax, block.uses + 1);
            }
            break;
        case PolicyKind::kSeconds:
            if (block.uses > 0) {
                reuse_->add(block.segment, block.watched, block.unused, true);
            }
            ++block.uses;
            block.unused = 0;
            block.watched = 0;
            block.last = now_;
            block.order = ++order_;
            block.key = static_cast<double>(block.order);
            block.segment = static_cast<std::uint16_t>(
                ReuseTable::class_of(block.uses, static_cast<std::uint64_t>(block.depth) * block_size_, use.kind));
            break;
    }
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
    if (kind_ == PolicyKind::kSeconds) {
        if (block.uses > 0) {
            const std::size_t watched = reuse_->add(block.segment, block.watched, now_ - block.last, false);
            const auto octaves = static_cast<std::uint8_t>(watched);
            if (const auto dropped = ghosts_->put({hash, block.last, block.uses, block.segment, octaves, true})) {
                reuse_->add(dropped->segment, dropped->watched, now_ - dropped->last, false);
            }
        }
    } else if (kind_ == PolicyKind::kArc) {
        --num_cached_[block.segment];
        ++num_ghosts_[block.segment];
        if (const auto dropped = ghosts_->put({hash, 0, 0, block.segment, 0, true})) {
            --num_ghosts_[dropped->segment];
        }
    } else if (kind_ == PolicyKind::kS3Fifo) {
        --num_cached_[block.segment];
        if (block.segment == 0) {
            ghosts_->put({hash, 0, 0, 0, 0, true});
        }
    }
}

void Eviction::forgotten(BlockId id) {
    Meta& block = metas_[at(id)];
    block.until_s = kForever;
    if (kind_ == PolicyKind::kArc || kind_ == PolicyKind::kS3Fifo) {
        --num_cached_[block.segment];
    }
}

void Eviction::reset() {
    metas_.clear();
    ranks_.assign(kNumRanks, Rank{});
    deadlines_ = {};
    num_cached_ = {};
    num_ghosts_ = {};
    if (ghosts_) {
        ghosts_->clear();
    }
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

std::size_t Eviction::num_segments() const {
    return kind_ == PolicyKind::kSeconds ? ReuseTable::kClasses : 2;
}

void Eviction::add_leaf(BlockId id) {
    Meta& block = metas_[at(id)];
    if (block.order == 0) {  // no request used it
        block.order = ++order_;
        block.key = kind_ == PolicyKind::kLfu ? floor_ : static_cast<double>(block.order);
    }
    Rank& rank = ranks_[block.rank];
    if (rank.segments.empty()) {
        rank.segments.resize(num_segments());
        rank.where.assign(num_segments(), kNoPlace);
    }
    Heap& heap = rank.segments[block.segment];
    if (heap.empty()) {
        rank.where[block.segment] = static_cast<std::int32_t>(rank.filled.size());
        rank.filled.push_back(block.segment);
    }
    heap.emplace_back();
    sift(heap, heap.size() - 1, {block.key, block.order, id});
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
    return head(*rank);
}

BlockId Eviction::head(const Rank& rank) {
    switch (kind_) {
        case PolicyKind::kArc:
            return head_of_queues(rank);
        case PolicyKind::kS3Fifo:
            return head_of_s3_fifo(rank);
        case PolicyKind::kLfu: {
            const Leaf& first = rank.segments[0].front();
            floor_ = std::max(floor_, first.key);
            return first.id;
        }
        default:
            break;
    }
    const Leaf* first = nullptr;
    double least = 0.0;
    for (const std::uint16_t segment : rank.filled) {
        const Leaf& leaf = rank.segments[segment].front();
        const double key = score(leaf);
        if (first == nullptr || key < least || (key == least && leaf.order < first->order)) {
            first = &leaf;
            least = key;
        }
    }
    return first->id;
}

std::tuple<std::uint8_t, double, std::uint64_t> Eviction::standing(BlockId id) const {
    const Meta& block = metas_[at(id)];
    const double key = kind_ == PolicyKind::kSeconds ? score({block.key, block.order, id}) : block.key;
    return {block.rank, key, block.order};
}

// Expected seconds lost for each eviction that the block would stay.
double Eviction::score(const Leaf& leaf) const {
    const Meta& block = metas_[at(leaf.id)];
    return reuse_->index(block.segment, now_ - block.last) * weight(block.depth);
}

// Mean seconds of a token up to that depth: if the prefix goes, all its blocks go, and not only the dearest last one.
double Eviction::weight(std::int32_t depth) const {
    const double before = static_cast<double>(depth) * static_cast<double>(block_size_);
    return std::min(price_.load_s, price_.token_s + price_.deeper_s * before * 0.5);
}

BlockId Eviction::head_of_queues(const Rank& rank) {
    std::size_t queue = static_cast<double>(num_cached_[0]) > target_ ? 0 : 1;
    if (rank.segments[queue].empty()) {
        queue = 1 - queue;
    }
    return rank.segments[queue].front().id;
}

// The first queue is to have a tenth of the blocks. What was used in it moves to the second one, which gives used
// blocks another round.
BlockId Eviction::head_of_s3_fifo(const Rank& rank) {
    for (;;) {
        std::size_t queue = num_cached_[0] * 10 > num_blocks_ ? 0 : 1;
        if (rank.segments[queue].empty()) {
            queue = 1 - queue;
        }
        const BlockId id = rank.segments[queue].front().id;
        Meta& block = metas_[at(id)];
        if (block.uses == 0) {
            return id;
        }
        remove_leaf(id);
        --num_cached_[block.segment];
        block.uses = queue == 0 ? 0 : block.uses - 1;
        block.segment = 1;
        ++num_cached_[1];
        block.order = ++order_;
        block.key = static_cast<double>(block.order);
        add_leaf(id);
    }
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
