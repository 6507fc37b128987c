#include "content.hpp"

#include <algorithm>
#include <utility>

namespace penstock {
namespace {

constexpr std::size_t kWindow = 16; // blocks whose cache lines are fetched side by side

}  // namespace

void Content::store(HashView hashes, std::optional<std::uint64_t> parent, std::size_t tier) {
    for (std::size_t begin = 0; begin < hashes.size(); begin += kWindow) {
        const std::size_t end = std::min(begin + kWindow, hashes.size());
        for (std::size_t i = begin; i < end; ++i) {
            blocks_.prefetch(hashes[i]);
        }
        for (std::size_t i = begin; i < end; ++i) {
            Block& block = blocks_.find_or_insert(hashes[i]);
            if (block.vacant()) {
                block.parent = parent;
            }
            block.copies = block.copies.more(tier);
            parent = hashes[i];
        }
    }
}

void Content::remove(HashView hashes, std::size_t tier) {
    for (std::size_t begin = 0; begin < hashes.size(); begin += kWindow) {
        const std::size_t end = std::min(begin + kWindow, hashes.size());
        for (std::size_t i = begin; i < end; ++i) {
            blocks_.prefetch(hashes[i]);
        }
        for (std::size_t i = begin; i < end; ++i) {
            Block* block = blocks_.find(hashes[i]);
            if (block == nullptr || block->copies.copies(tier) == 0) {
                ++unknown_removals_;
                continue;
            }
            const Holding left = block->copies.less(tier);
            if (left.has_copies()) {
                block->copies = left;
            } else {
                blocks_.erase(hashes[i]);
            }
        }
    }
}

ContentWalk Content::walk() { return ContentWalk(blocks_.view()); }

std::vector<std::shared_ptr<void>> Content::clear() { return blocks_.clear(); }

ContentWalk::ContentWalk(BucketMap<Block> blocks) : blocks_(std::move(blocks)) {
    offsets_.reserve(blocks_.num_maps());
    std::size_t num_slots = 0;
    for (std::size_t map = 0; map < blocks_.num_maps(); ++map) {
        offsets_.push_back(num_slots);
        num_slots += blocks_.map(map).num_slots();
    }
    has_child_.resize(num_slots);
    is_said_.resize(num_slots);
}

std::size_t ContentWalk::number(std::uint64_t key, const Block& block) const {
    const std::size_t map = blocks_.map_of(key);
    return offsets_[map] + blocks_.map(map).slot_of(block);
}

// Go on to the next block of all, whose end is the end of a pass.
void ContentWalk::next_block() {
    const FlatMap<Block>& map = blocks_.map(map_);
    if (slot_ == map.num_slots()) {
        slot_ = 0;
        if (++map_ == blocks_.num_maps()) {
            map_ = 0;
            pass_ = static_cast<Pass>(static_cast<int>(pass_) + 1);
        }
        return;
    }
    const auto [key, block] = map.slot(slot_++);
    if (block->vacant()) {
        return;
    }
    if (pass_ == Pass::kMark) {
        if (const Block* parent = block->parent ? blocks_.find(*block->parent) : nullptr) {
            has_child_[number(*block->parent, *parent)] = true;
        }
    } else if (!is_said_[number(key, *block)] && (pass_ == Pass::kOthers || !has_child_[number(key, *block)])) {
        climbing_ = {key, block};
    }
}

// From a block up to the first that is said already, or has no parent here.
void ContentWalk::climb() {
    const auto [key, block] = climbing_;
    climbing_ = {};
    if (is_said_[number(key, *block)]) {
        return;
    }
    is_said_[number(key, *block)] = true;
    path_.emplace_back(key, block);
    if (block->parent) {
        climbing_ = {*block->parent, blocks_.find(*block->parent)};
    }
}

void ContentWalk::say(std::vector<std::uint64_t>& hashes, std::vector<Run>& runs) {
    const auto [key, block] = path_.back();
    path_.pop_back();
    if (hashes.empty() || block->parent != hashes.back() || block->copies.bits() != latest_.bits()) {
        Run& run = runs.emplace_back(Run{block->parent, 0, {}});
        for (std::size_t tier = 0; tier < kTiers; ++tier) {
            run.copies[tier] = block->copies.copies(tier);
        }
    }
    hashes.push_back(key);
    runs.back().end = hashes.size();
    latest_ = block->copies;
}

std::pair<std::vector<std::uint64_t>, std::vector<Run>> ContentWalk::next(std::size_t steps) {
    std::vector<std::uint64_t> hashes;
    std::vector<Run> runs;
    for (; steps > 0 && !is_done(); --steps) {
        if (climbing_.second != nullptr) {
            climb();
        } else if (!path_.empty()) {
            say(hashes, runs);
        } else {
            next_block();
        }
    }
    return {std::move(hashes), std::move(runs)};
}

void Content::check() const {
    std::size_t count = 0;
    blocks_.for_each([&](std::uint64_t key, const Block& block) {
        require(blocks_.find(key) == &block, "content: each block is found");
        require(block.copies.worker() == 0, "content: of one worker");
        ++count;
    });
    require(count == size(), "content: blocks are counted");
}

}  // namespace penstock
