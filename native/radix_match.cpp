// What a request's hashes find in the prefix index. It may run in several threads at once and writes stamps only.

#include "radix.hpp"

#include <algorithm>

namespace penstock {
namespace {

constexpr std::uint32_t kStampMax = UINT32_MAX / 4 * 3; // here the clock waits for a store, which renumbers

}  // namespace

HoldersId RadixTree::holders_of(std::uint64_t key) const {
    const Place* place = places_.find(key);
    return place == nullptr ? HoldersTable::kNobody : place->holders;
}

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
        if (!tree_.sharers_.empty()) {
            find_sharing(first_holders);
            spread();
        }
        return deepest_;
    }

    // Count the blocks by tier that the depths found hold.
    void count_tiers(std::int32_t* tiers) const {
        const std::size_t num_slots = depths_.size();
        bool any_lower = false;
        for (const std::uint64_t entry : tree_.holders_.entries(at(0))) {
            const Tenant& tenant = tree_.tenants_[worker_of(entry)];
            if (tenant.slot < num_slots && !is_shared(tenant.slot)) {
                const bool lower = tenant.lower > 0;
                any_lower |= lower;
                tiers[tenant.slot] = lower ? 0 : depths_[tenant.slot];
            }
        }
        const bool shares = !sharing_.empty();
        std::vector<std::uint8_t> nearest(shares ? tree_.num_slots() : 0);
        for (std::size_t begin = 0, end = 0; (any_lower || shares) && begin < deepest_; begin = end) {
            const HoldersId holders = at(begin);
            for (end = begin + 1; end < deepest_ && at(end) == holders;) {
                ++end;
            }
            if (shares) {
                count_shared(holders, begin, end, nearest, tiers);
            }
            for (const std::uint64_t entry : tree_.holders_.entries(holders)) {
                const Holding holding(entry);
                const Tenant& tenant = tree_.tenants_[holding.worker()];
                if (tenant.slot < num_slots && tenant.lower > 0 && !is_shared(tenant.slot)) {
                    const auto depth = static_cast<std::size_t>(depths_[tenant.slot]);
                    const std::size_t counted = std::min(depth, end) - std::min(depth, begin);
                    tiers[holding.best_tier() * num_slots + tenant.slot] += static_cast<std::int32_t>(counted);
                }
            }
        }
    }

  private:
    HoldersId at(std::size_t position) const { return tree_.holders_of(hashes_[position]); }

    // Whether the slot's depth depends on what others hold, or is no worker's.
    bool is_shared(std::uint32_t slot) const { return tree_.has_sources(slot) || tree_.is_source(slot); }

    // Call with the slots of each worker that can load from a set of holders, and with the tier that it loads from.
    template <class Call>
    void for_each_loader(HoldersId holders, const Call& call) const {
        for (const std::uint64_t entry : tree_.holders_.entries(holders)) {
            if (tree_.is_gone(entry)) {
                continue;
            }
            const std::uint32_t slot = tree_.tenants_[worker_of(entry)].slot;
            const std::size_t tier = Holding(entry).best_tier();
            if (tree_.is_source(slot)) {
                for (const std::uint32_t loader : tree_.loaders_[slot]) {
                    call(loader, tier);
                }
            } else {
                call(slot, tier);
            }
        }
    }

    // Find the workers with sources that can load the first block: the others have depth 0.
    void find_sharing(HoldersId first_holders) {
        for_each_loader(first_holders, [&](std::uint32_t slot, std::size_t) {
            if (slot < depths_.size() && tree_.has_sources(slot)) {
                sharing_.push_back(slot);
            }
        });
        std::ranges::sort(sharing_);
        sharing_.erase(std::unique(sharing_.begin(), sharing_.end()), sharing_.end());
    }

    // A worker with sources has the greatest depth of its own and theirs: what holds a block without holes holds all
    // before it. Where one has holes the prefix is walked. Sources are no workers and end with 0.
    void spread() {
        std::vector<std::uint32_t> walking;
        for (const std::uint32_t slot : sharing_) {
            bool has_holes = tree_.is_irregular(slot);
            std::int32_t depth = depths_[slot];
            for (const std::uint32_t source : tree_.sources_[slot]) {
                has_holes |= source >= depths_.size() || tree_.is_irregular(source);
                depth = std::max(depth, source < depths_.size() ? depths_[source] : 0);
            }
            depths_[slot] = has_holes ? 0 : depth;
            if (has_holes) {
                walking.push_back(slot);
            }
        }
        for (const std::uint32_t slot : sharing_) {
            for (const std::uint32_t source : tree_.sources_[slot]) {
                if (source < depths_.size()) {
                    depths_[source] = 0;
                }
            }
        }
        if (!walking.empty()) {
            walk_shared(walking);
        }
    }

    void walk_shared(std::vector<std::uint32_t>& walking) {
        std::vector<std::uint32_t> seen(tree_.num_slots()); // by slot, the number of the latest set that it loads from
        std::uint32_t number = 0;
        HoldersId previous = HoldersTable::kNobody;
        const auto end_at = [&](std::uint32_t slot, std::size_t position) {
            depths_[slot] = static_cast<std::int32_t>(position);
            deepest_ = std::max(deepest_, position);
        };
        for (std::size_t position = 0; position < hashes_.size() && !walking.empty(); ++position) {
            const HoldersId holders = at(position);
            if (holders == previous && number > 0) {
                continue;
            }
            previous = holders;
            ++number;
            for_each_loader(holders, [&](std::uint32_t slot, std::size_t) { seen[slot] = number; });
            std::erase_if(walking, [&](std::uint32_t slot) {
                const bool is_lost = seen[slot] != number;
                if (is_lost) {
                    end_at(slot, position);
                }
                return is_lost;
            });
        }
        for (const std::uint32_t slot : walking) {
            end_at(slot, hashes_.size());
        }
    }

    // Count blocks `begin` to `end`, which are held alike, by the nearest tier of each worker with sources.
    void count_shared(HoldersId holders, std::size_t begin, std::size_t end, std::vector<std::uint8_t>& nearest,
                      std::int32_t* tiers) const {
        for (const std::uint32_t slot : sharing_) {
            nearest[slot] = kTiers;
        }
        for_each_loader(holders, [&](std::uint32_t slot, std::size_t tier) {
            nearest[slot] = std::min(nearest[slot], static_cast<std::uint8_t>(tier));
        });
        const std::size_t num_slots = depths_.size();
        for (const std::uint32_t slot : sharing_) {
            const auto depth = static_cast<std::size_t>(depths_[slot]);
            if (depth > begin) {
                tiers[nearest[slot] * num_slots + slot] += static_cast<std::int32_t>(std::min(depth, end) - begin);
            }
        }
    }

    void set_depth(std::uint32_t tenant, std::size_t depth) {
        depths_[tree_.tenants_[tenant].slot] = static_cast<std::int32_t>(depth);
        deepest_ = std::max(deepest_, depth);
    }

    bool is_searched(std::uint32_t tenant_id) const {
        const Tenant& tenant = tree_.tenants_[tenant_id];
        return tenant.slot < depths_.size() && !tenant.irregular();
    }

    // Call with each searched tenant that is among `some` and not among `others`, until a call gives false.
    template <class Call>
    void for_each_lost(HoldersId some, HoldersId others, const Call& call) const {
        const std::span<const std::uint64_t> rest = tree_.holders_.entries(others);
        auto other = rest.begin();
        for (const std::uint64_t entry : tree_.holders_.entries(some)) {
            const std::uint32_t tenant = worker_of(entry);
            while (other != rest.end() && worker_of(*other) < tenant) {
                ++other;
            }
            const bool kept = other != rest.end() && worker_of(*other) == tenant;
            if (!kept && is_searched(tenant) && !call(tenant)) {
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
            for_each_lost(low_holders, high_holders, [&](std::uint32_t tenant) {
                set_depth(tenant, high);
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
            const Tenant& tenant = tree_.tenants_[worker_of(entry)];
            if (tenant.slot < depths_.size() && tenant.irregular() && !is_shared(tenant.slot)) {
                walking.push_back(worker_of(entry));
            }
        }
        HoldersId previous = first_holders;
        for (std::size_t position = 1; position < hashes_.size() && !walking.empty(); ++position) {
            const HoldersId holders = at(position);
            if (holders != previous) {
                std::erase_if(walking, [&](std::uint32_t tenant) {
                    if (tree_.holders_.contains(holders, tenant)) {
                        return false;
                    }
                    set_depth(tenant, position);
                    return true;
                });
                previous = holders;
            }
        }
        for (const std::uint32_t tenant : walking) {
            set_depth(tenant, hashes_.size());
        }
    }

    const RadixTree& tree_;
    HashView hashes_;
    std::span<std::int32_t> depths_;
    std::size_t deepest_ = 0;
    std::vector<std::uint32_t> sharing_; // ascending
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
    // The one thing that matches write, several at once.
    auto& last = const_cast<Node&>(node(places_.find(hashes[deepest - 1])->node));
    std::atomic_ref(last.stamp).store(stamp, std::memory_order_relaxed);
}

}  // namespace penstock
