#include "content.hpp"

#include <algorithm>
#include <ranges>

namespace penstock {
namespace {

constexpr std::size_t kWindow = 16; // blocks whose cache lines are fetched side by side

}  // namespace

void Content::store(HashView hashes, std::optional<std::uint64_t> parent, std::size_t tier) {
    for (std::size_t begin = 0; begin < hashes.size(); begin += kWindow) {
        const std::size_t end = std::min(begin + kWindow, hashes.size());
        blocks_.reserve(end - begin);
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
                blocks_.erase(*block);
            }
        }
    }
}

std::pair<std::vector<std::uint64_t>, std::vector<Run>> Content::runs() const {
    std::vector<bool> has_child(blocks_.num_slots());
    blocks_.for_each([&](std::uint64_t, const Block& block) {
        if (const Block* parent = block.parent ? blocks_.find(*block.parent) : nullptr) {
            has_child[blocks_.slot_of(*parent)] = true;
        }
    });
    std::vector<std::uint64_t> hashes;
    std::vector<Run> found;
    hashes.reserve(size());
    std::vector<bool> is_said(blocks_.num_slots());
    std::vector<std::pair<std::uint64_t, const Block*>> path;
    Holding latest{std::uint32_t{0}};
    const auto say_down_to = [&](std::uint64_t key, const Block* block) {
        for (path.clear(); block != nullptr && !is_said[blocks_.slot_of(*block)];) {
            is_said[blocks_.slot_of(*block)] = true;
            path.emplace_back(key, block);
            key = block->parent.value_or(0);
            block = block->parent ? blocks_.find(key) : nullptr;
        }
        for (const auto& [hash, said] : path | std::views::reverse) {
            if (hashes.empty() || said->parent != hashes.back() || said->copies.bits() != latest.bits()) {
                Run& run = found.emplace_back(Run{said->parent, 0, {}});
                for (std::size_t tier = 0; tier < kTiers; ++tier) {
                    run.copies[tier] = said->copies.copies(tier);
                }
            }
            hashes.push_back(hash);
            found.back().end = hashes.size();
            latest = said->copies;
        }
    };
    blocks_.for_each([&](std::uint64_t key, const Block& block) {
        if (!has_child[blocks_.slot_of(block)]) {
            say_down_to(key, &block);
        }
    });
    blocks_.for_each([&](std::uint64_t key, const Block& block) { say_down_to(key, &block); }); // parents in a circle
    return {std::move(hashes), std::move(found)};
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
