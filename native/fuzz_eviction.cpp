// Fuzz target: the pool's policies by key, and the shares of tenants, against a straightforward pool that looks at every
// block for each victim. Prefixes come, go and are evicted; both are to keep the same blocks throughout.

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "fuzz_eviction.hpp"
#include "pool.hpp"

namespace {

using penstock::BlockId;
using penstock::Hash;
using Ids = std::vector<BlockId>;

void require(bool condition, const char* what) {
    if (!condition) {
        std::fprintf(stderr, "%s\n", what);
        std::abort();
    }
}

class Comparison {
  public:
    // `tenant_share` in quarters of the pool.
    Comparison(const std::uint8_t* data, std::size_t size, std::size_t num_blocks, std::size_t tenant_share)
        : bytes_(data, size), num_blocks_(num_blocks),
          pool_(num_blocks, penstock::PolicyKind::kSeconds, kBlockSize, kPrice, num_blocks * tenant_share / 4),
          plain_(num_blocks, kBlockSize, kPrice, num_blocks * tenant_share / 4) {}

    void run() {
        while (!bytes_.empty()) {
            step();
            pool_.take_changes();
            pool_.check();
            compare();
        }
    }

  private:
    static constexpr std::size_t kBlockSize = 512;
    static constexpr penstock::PrefillPrice kPrice{1.0, 0.001, 3.0};

    bool is_small() const { return num_blocks_ < 50; }

    std::uint8_t take() {
        if (bytes_.empty()) {
            return 0;
        }
        const std::uint8_t byte = bytes_.front();
        bytes_ = bytes_.subspan(1);
        return byte;
    }

    // A chain: a block's name says all that is before it. Large pools have many short ones, so many leaves.
    std::vector<Hash> take_chain() {
        std::vector<Hash> hashes(take() % (is_small() ? 12u : 3u));
        std::uint64_t before = take() % 3u + 1u;
        for (Hash& hash : hashes) {
            before = before * 32 + take() % (is_small() ? 2u : 32u);
            hash = {before, before};
        }
        return hashes;
    }

    std::optional<penstock::BlockUse> take_use() {
        const std::uint8_t what = take();
        if (what % 4 == 0) {
            return std::nullopt;
        }
        penstock::BlockUse use{.kind = static_cast<std::uint8_t>(what % penstock::ReuseTable::kKinds)};
        use.priority = static_cast<std::int8_t>(what / 16 - 8);
        use.tenant = is_small() ? take() % 4u : take() % 4u == 0 ? 2u : 1u;
        if (what % 3 == 0) {
            use.until_s = take();
        }
        return use;
    }

    void step() {
        const std::uint8_t what = take();
        if (what < 110) {
            grow(take_chain());
        } else if (what < 225) {
            end_one();
        } else if (what < 240) {
            const double now_s = take();
            const std::size_t most = take();
            pool_.expire(now_s, most);
            plain_.expire(now_s, most);
        } else if (what < 245) {
            const std::size_t count = take() % num_blocks_;
            pool_.make_room(count);
            plain_.make_room(count);
        } else if (what < 250) {
            const penstock::PrefillPrice price{1.0, 0.001, 1.0 + take() / 64.0};
            pool_.set_price(price);
            plain_.set_price(price);
        } else if (what < 253) {
            if (!sequences_.empty() && !sequences_.back().empty()) {
                const BlockId last = sequences_.back().back();
                pool_.forget({&last, 1});
                plain_.forget(last);
            }
        } else if (take() % 8 == 0) {
            pool_.reset();
            plain_.reset();
        }
    }

    void end_one() {
        if (sequences_.empty()) {
            return;
        }
        std::swap(sequences_[take() % sequences_.size()], sequences_.back());
        const Ids ids = std::move(sequences_.back());
        sequences_.pop_back();
        const auto use = take_use();
        pool_.release(ids, use);
        plain_.release(ids, use);
    }

    void grow(const std::vector<Hash>& hashes) {
        Ids ids = pool_.match(hashes);
        require(ids == plain_.match(hashes), "another prefix is cached");
        pool_.acquire(ids);
        plain_.acquire(ids);
        const std::size_t start = ids.size();
        const auto more = pool_.allocate(hashes.size() - start);
        if (!more) {
            pool_.release(ids);
            plain_.release(ids, std::nullopt);
            return;
        }
        plain_.allocate(*more);
        const auto parent = start > 0 ? std::optional(hashes[start - 1].low) : std::nullopt;
        const std::vector<Hash> rest(hashes.begin() + static_cast<std::ptrdiff_t>(start), hashes.end());
        pool_.commit(*more, rest, parent);
        plain_.commit(*more, rest, parent);
        ids.insert(ids.end(), more->begin(), more->end());
        sequences_.push_back(std::move(ids));
    }

    void compare() {
        require(pool_.num_available() == plain_.num_available(), "other blocks are held");
        const std::vector<Hash> resident = pool_.resident_hashes();
        require(resident.size() == plain_.num_cached(), "more blocks or fewer are cached");
        require(std::ranges::all_of(resident, [&](Hash hash) { return plain_.contains(hash); }), "other blocks are cached");
    }

    std::span<const std::uint8_t> bytes_;
    std::size_t num_blocks_;
    penstock::Pool pool_;
    penstock::PlainEviction plain_;
    std::vector<Ids> sequences_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size > 0) {
        constexpr std::size_t shares[] = {4, 0, 1, 2};
        const std::size_t num_blocks = data[0] / 16 % 2 == 0 ? 24 : 100;
        Comparison(data + 1, size - 1, num_blocks, shares[data[0] / 4 % 4]).run();
    }
    return 0;
}
