// Fuzz target: the prefix index against a second, straightforward one of maps, which looks at everything each time.

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <optional>
#include <vector>

#include "radix.hpp"

namespace {

using Copies = std::array<std::uint32_t, penstock::kTiers>;
using Hashes = std::vector<std::uint64_t>;

struct Block {
    std::optional<std::uint64_t> parent;
    std::uint64_t used = 0;
    std::map<std::uint32_t, Copies> holders;
};

void require(bool holds, const char* what) {
    if (!holds) {
        std::fprintf(stderr, "the prefix index differs: %s\n", what);
        std::abort();
    }
}

class Straightforward {
  public:
    explicit Straightforward(std::size_t pairs_max) : pairs_max_(pairs_max) {}

    std::map<std::uint64_t, Block> blocks;
    std::size_t evicted_pairs = 0;
    std::size_t unknown_removals = 0;
    std::size_t contradictions = 0;

    std::size_t pairs() const {
        std::size_t count = 0;
        for (const auto& [hash, block] : blocks) {
            count += block.holders.size();
        }
        return count;
    }

    void store(std::uint32_t worker, const Hashes& hashes, std::optional<std::uint64_t> parent, std::size_t tier) {
        ++clock_;
        for (const std::uint64_t hash : hashes) {
            const auto [at, is_new] = blocks.try_emplace(hash, Block{parent, 0, {}});
            contradictions += at->second.parent != parent;
            at->second.used = clock_;
            ++at->second.holders[worker][tier];
            parent = hash;
        }
        while (pairs() > pairs_max_) {
            const auto victim = oldest();
            evicted_pairs += victim->second.holders.size();
            blocks.erase(victim);
        }
    }

    void remove(std::uint32_t worker, const Hashes& hashes, std::size_t tier) {
        for (const std::uint64_t hash : hashes) {
            const auto at = blocks.find(hash);
            if (at == blocks.end() || !at->second.holders.contains(worker) || at->second.holders[worker][tier] == 0) {
                ++unknown_removals;
                continue;
            }
            --at->second.holders[worker][tier];
            if (at->second.holders[worker] == Copies{}) {
                drop(at, worker);
            }
        }
    }

    void clear(std::uint32_t worker) {
        for (auto at = blocks.begin(); at != blocks.end();) {
            drop(at++, worker);
        }
    }

    // Whether the tree takes it.
    bool share(std::uint32_t worker, const std::vector<std::uint32_t>& sources) {
        const auto is_both = [&](std::uint32_t source) { return source == worker || !sources_[source].empty(); };
        if (!sources.empty() && (is_source(worker) || std::ranges::any_of(sources, is_both))) {
            return false;
        }
        sources_[worker] = sources;
        return true;
    }

    void match(const Hashes& hashes, std::vector<std::int32_t>& depths, std::vector<std::int32_t>& tiers) {
        std::int32_t deepest = 0;
        for (std::uint32_t worker = 0; worker < depths.size(); ++worker) {
            if (is_source(worker)) {
                continue;
            }
            std::vector<std::uint32_t> from = sources_[worker];
            from.push_back(worker);
            for (const std::uint64_t hash : hashes) {
                const auto at = blocks.find(hash);
                std::size_t best = penstock::kTiers;
                for (const std::uint32_t each : from) {
                    if (at != blocks.end() && at->second.holders.contains(each)) {
                        const Copies& copies = at->second.holders[each];
                        const auto tier = std::ranges::find_if(copies, [](std::uint32_t count) { return count > 0; });
                        best = std::min(best, static_cast<std::size_t>(tier - copies.begin()));
                    }
                }
                if (best == penstock::kTiers) {
                    break;
                }
                ++tiers[best * depths.size() + worker];
                deepest = std::max(deepest, ++depths[worker]);
            }
        }
        if (deepest > 0) {
            blocks[hashes[static_cast<std::size_t>(deepest) - 1]].used = ++clock_;
        }
    }

  private:
    bool is_source(std::uint32_t slot) const {
        return std::ranges::any_of(sources_, [&](const auto& entry) { return std::ranges::count(entry.second, slot) > 0; });
    }

    using Place = std::map<std::uint64_t, Block>::iterator;

    void drop(Place at, std::uint32_t worker) {
        at->second.holders.erase(worker);
        if (at->second.holders.empty()) {
            blocks.erase(at);
        }
    }

    Place oldest() {
        std::vector<std::uint64_t> parents;
        for (const auto& [hash, block] : blocks) {
            if (block.parent) {
                parents.push_back(*block.parent);
            }
        }
        Place found = blocks.end();
        for (const bool leaves_only : {true, false}) {
            for (auto at = blocks.begin(); at != blocks.end(); ++at) {
                if (leaves_only && std::ranges::find(parents, at->first) != parents.end()) {
                    continue;
                }
                if (found == blocks.end() || at->second.used < found->second.used) { // the map goes by hash
                    found = at;
                }
            }
            if (found != blocks.end()) {
                break;
            }
        }
        return found;
    }

    std::size_t pairs_max_;
    std::uint64_t clock_ = 0;
    std::map<std::uint32_t, std::vector<std::uint32_t>> sources_;
};

class Input {
  public:
    Input(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

    bool is_empty() const { return size_ == 0; }

    std::uint32_t below(std::uint32_t bound) {
        if (size_ == 0) {
            return 0;
        }
        --size_;
        return *data_++ % bound;
    }

  private:
    const std::uint8_t* data_;
    std::size_t size_;
};

// Names of a small forest: node n has the parent n / 2.
class Names {
  public:
    // Keys whose places in a map are all the same, or spread.
    explicit Names(bool collide) : factor_(collide ? 0xf1de83e19937733d : 0xd1342543de82ef95) {}

    std::uint64_t key(std::uint64_t node) const { return node * factor_; }

    Hashes chain_to(std::uint64_t node) const {
        Hashes chain;
        for (; node > 0; node /= 2) {
            chain.push_back(key(node));
        }
        std::ranges::reverse(chain);
        return chain;
    }

  private:
    std::uint64_t factor_;
};

penstock::HashView view(const Hashes& hashes) { return {hashes.data(), sizeof(std::uint64_t), hashes.size()}; }

void compare_matches(const penstock::RadixTree& tree, Straightforward& model, const Hashes& hashes) {
    const std::size_t num_slots = tree.num_slots();
    std::vector<std::int32_t> depths(num_slots);
    std::vector<std::int32_t> tiers(num_slots * penstock::kTiers);
    std::vector<std::int32_t> expected_depths = depths;
    std::vector<std::int32_t> expected_tiers = tiers;
    tree.match(view(hashes), depths, tiers.data(), tree.claim_stamps(1));
    model.match(hashes, expected_depths, expected_tiers);
    require(depths == expected_depths, "depths");
    require(tiers == expected_tiers, "blocks by tier");
}

void compare_contents(const penstock::RadixTree& tree, const Straightforward& model) {
    std::map<std::pair<std::uint64_t, std::uint32_t>, std::pair<Copies, std::optional<std::uint64_t>>> found;
    std::size_t expected = 0;
    for (std::uint32_t worker = 0; worker < tree.num_slots(); ++worker) {
        const auto [hashes, runs] = tree.runs(worker);
        std::size_t at = 0;
        for (const penstock::Run& run : runs) {
            for (std::optional<std::uint64_t> parent = run.parent; at < run.end; parent = hashes[at++]) {
                found[{hashes[at], worker}] = {run.copies, parent};
            }
        }
    }
    for (const auto& [hash, block] : model.blocks) {
        for (const auto& [worker, copies] : block.holders) {
            ++expected;
            require(found.contains({hash, worker}) && found[{hash, worker}] == std::pair(copies, block.parent),
                    "a block's copies and parent");
        }
    }
    require(found.size() == expected, "the blocks held");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    Input input(data, std::min<std::size_t>(size, 400));
    const std::uint32_t kind = input.below(8);
    const Names names(kind % 2 == 0);
    const bool nonsense = kind >= 6; // any parent may be told; then depths have no meaning
    const std::size_t pairs_max = input.below(3) == 0 ? 1'000'000 : input.below(40) + 1;
    const std::uint32_t clock_max = 20 + input.below(40);
    const penstock::RadixLimits limits{
        .clock_max = clock_max, .leaves_min = input.below(3) + 1, .hub_children = input.below(4) + 2};
    penstock::RadixTree tree(pairs_max, input.below(4), limits);
    bool reclaiming = false;
    const auto reclaim_all = [&] {
        while (tree.reclaim(1)) {
            tree.check();
        }
        reclaiming = false;
    };
    Straightforward model(pairs_max);
    while (!input.is_empty()) {
        const std::uint32_t worker = input.below(9);
        const std::uint32_t node = input.below(250) + 1;
        const std::size_t tier = std::max(input.below(8), 4U) - 4;
        Hashes hashes = names.chain_to(node);
        switch (input.below(9)) {
            case 0:
            case 1:
            case 2: {
                const std::size_t skip = input.below(static_cast<std::uint32_t>(hashes.size()));
                std::optional<std::uint64_t> parent;
                if (skip > 0) {
                    parent = hashes[skip - 1];
                }
                if (nonsense) {
                    parent = names.key(input.below(90));
                }
                hashes.erase(hashes.begin(), hashes.begin() + static_cast<std::ptrdiff_t>(skip));
                if (pairs_max < 1'000'000) {
                    reclaim_all(); // so that both evict the same
                }
                tree.store(worker, view(hashes), parent, tier);
                model.store(worker, hashes, parent, tier);
                break;
            }
            case 3:
            case 4:
                if (input.below(2) == 0) {
                    std::ranges::reverse(hashes);
                }
                tree.remove(worker, view(hashes), tier);
                model.remove(worker, hashes, tier);
                break;
            case 5:
                if (input.below(3) == 0) {
                    reclaiming = tree.reclaim(input.below(20));
                    break;
                }
                tree.clear(worker);
                model.clear(worker);
                reclaiming = true;
                break;
            case 6: {
                std::vector<std::uint32_t> sources;
                for (std::uint32_t count = input.below(3); count > 0; --count) {
                    sources.push_back(input.below(9));
                }
                bool is_taken = true;
                try {
                    tree.share(worker, sources);
                } catch (const std::invalid_argument&) {
                    is_taken = false;
                }
                require(model.share(worker, sources) == is_taken, "whose blocks are loaded");
                break;
            }
            default:
                if (!nonsense) {
                    compare_matches(tree, model, hashes);
                }
        }
        tree.check();
        const penstock::RadixStats stats = tree.stats();
        require(stats.pairs == model.pairs(), "the pairs");
        require(stats.nodes == model.blocks.size() || (reclaiming && stats.nodes > model.blocks.size()), "the nodes");
        require(stats.evicted_pairs == model.evicted_pairs, "evictions");
        require(stats.unknown_removals == model.unknown_removals, "unknown removals");
        require(stats.contradictions == model.contradictions, "contradictions");
    }
    compare_contents(tree, model);
    reclaim_all();
    require(tree.stats().nodes == model.blocks.size(), "the nodes, once all is reclaimed");
    compare_contents(tree, model);
    return 0;
}
