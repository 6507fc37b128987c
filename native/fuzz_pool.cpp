// Fuzz target: the block pool with lru against a straightforward one of maps and lists, through calls of any kind and
// order. fuzz_eviction.cpp has `seconds`.
// With Clang it is a libFuzzer target; elsewhere fuzz_main.cpp feeds it.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <list>
#include <map>
#include <utility>

#include "pool.hpp"

namespace {

using penstock::BlockId;
using penstock::Change;
using penstock::Hash;
using Ids = std::vector<BlockId>;
using Name = std::pair<std::uint64_t, std::uint64_t>;

void require(bool condition, const char* what) {
    if (!condition) {
        std::fprintf(stderr, "%s differs\n", what);
        std::abort();
    }
}

class Straightforward {
  public:
    explicit Straightforward(BlockId num_blocks) {
        while (num_blocks-- > 0) {
            free_.push_back(num_blocks);
        }
    }

    Ids match(const std::vector<Hash>& hashes) const {
        Ids found;
        for (const Hash hash : hashes) {
            const auto entry = by_name_.find({hash.low, hash.high});
            if (entry == by_name_.end()) {
                break;
            }
            found.push_back(entry->second);
        }
        return found;
    }

    bool acquire(BlockId id) {
        if (references_[id] == 0 && idle_.remove(id) == 0) {
            return false;
        }
        ++references_[id];
        return true;
    }

    struct Victim {
        BlockId id;
        Name name;
        std::optional<std::uint64_t> parent;
    };

    // What goes for so many free blocks, longest unused first; nothing if there are not as many.
    std::vector<Victim> make_room(std::size_t count) {
        std::vector<Victim> victims;
        if (count > num_available()) {
            return victims;
        }
        while (free_.size() < count) {
            const BlockId id = idle_.front();
            victims.push_back({id, names_[id], parents_[id]});
            removed_.push_back(names_[id].first);
            forget(id);
            free_.push_back(id);
            idle_.pop_front();
        }
        return victims;
    }

    std::optional<Ids> allocate(std::size_t count) {
        if (count > num_available()) {
            return std::nullopt;
        }
        make_room(count);
        Ids ids;
        while (ids.size() < count) {
            ids.push_back(free_.back());
            references_[free_.back()] = 1;
            free_.pop_back();
        }
        return ids;
    }

    bool release(BlockId id) {
        if (references_[id] == 0) {
            return false;
        }
        if (--references_[id] == 0) {
            if (names_.contains(id)) {
                idle_.push_back(id);
            } else {
                free_.push_back(id);
            }
        }
        return true;
    }

    bool commit(const Ids& ids, const std::vector<Hash>& hashes, std::optional<std::uint64_t> parent) {
        std::vector<std::uint64_t> stored;
        for (std::size_t index = 0; index <= ids.size(); ++index) {
            const bool is_new = index < ids.size() && !by_name_.contains({hashes[index].low, hashes[index].high});
            if (is_new) {
                const BlockId id = ids[index];
                if (names_.contains(id) || references_[id] == 0) {
                    return false;
                }
                names_[id] = {hashes[index].low, hashes[index].high};
                parents_[id] = index > 0 ? std::optional(hashes[index - 1].low) : parent;
                by_name_[names_[id]] = id;
                stored.push_back(hashes[index].low);
            } else if (!stored.empty()) {
                tell_removed();
                const std::size_t begin = index - stored.size();
                changes_.push_back({Change::kStored, begin > 0 ? hashes[begin - 1].low : parent, stored});
                stored.clear();
            }
        }
        return true;
    }

    bool forget_content(BlockId id) {
        if (references_[id] == 0) {
            return false;
        }
        if (names_.contains(id)) {
            removed_.push_back(names_[id].first);
            forget(id);
        }
        return true;
    }

    void reset() {
        free_.insert(free_.end(), idle_.begin(), idle_.end());
        idle_.clear();
        names_.clear();
        by_name_.clear();
        removed_.clear();
        changes_.push_back({Change::kCleared, std::nullopt, {}});
    }

    std::vector<Change> take_changes() {
        tell_removed();
        return std::exchange(changes_, {});
    }

    std::size_t num_available() const { return free_.size() + idle_.size(); }
    const std::map<Name, BlockId>& by_name() const { return by_name_; }

  private:
    void forget(BlockId id) {
        by_name_.erase(names_[id]);
        names_.erase(id);
    }

    void tell_removed() {
        if (!removed_.empty()) {
            changes_.push_back({Change::kRemoved, std::nullopt, std::exchange(removed_, {})});
        }
    }

    std::vector<BlockId> free_;
    std::list<BlockId> idle_;
    std::map<BlockId, int> references_;
    std::map<BlockId, Name> names_;
    std::map<BlockId, std::optional<std::uint64_t>> parents_;
    std::map<Name, BlockId> by_name_;
    std::vector<Change> changes_;
    std::vector<std::uint64_t> removed_;
};

template <class Call>
bool succeeds(const Call& call) {
    try {
        call();
        return true;
    } catch (const penstock::Broken&) {
        return false;
    }
}

class Comparison {
  public:
    Comparison(const std::uint8_t* data, std::size_t size)
        : bytes_(data, size), num_blocks_(static_cast<BlockId>(take() % 200 + 1)),
          pool_(static_cast<std::size_t>(num_blocks_)), other_(num_blocks_) {}

    void run() {
        while (!bytes_.empty()) {
            step();
        }
        pool_.check();
        compare_changes();
        for (const Hash hash : pool_.resident_hashes()) {
            require(other_.by_name().contains({hash.low, hash.high}), "a resident hash");
        }
    }

  private:
    std::uint8_t take() {
        if (bytes_.empty()) {
            return 0;
        }
        const std::uint8_t byte = bytes_.front();
        bytes_ = bytes_.subspan(1);
        return byte;
    }

    // Many of the same, so that they hit; some alike in 32 or 64 of their bits.
    Hash take_hash() {
        const std::uint64_t kind = take();
        const std::uint64_t number = take();
        return {number << (kind % 3 * 24), kind % 7 == 0 ? number : kind % 5};
    }

    std::vector<Hash> take_hashes(std::size_t count) {
        std::vector<Hash> hashes(count);
        std::ranges::generate(hashes, [&] { return take_hash(); });
        return hashes;
    }

    BlockId take_id() { return static_cast<BlockId>(take() % num_blocks_); }

    void step() {
        const std::uint8_t what = take();
        if (what < 90) {
            grow(take_hashes(what % 24u));
        } else if (what < 180) {
            end_one();
        } else if (what < 200) {
            const BlockId id = take_id();
            const bool is_good = other_.acquire(id);
            require(succeeds([&] { pool_.acquire({&id, 1}); }) == is_good, "acquire");
            if (is_good) {
                sequences_.push_back({id});
            }
        } else if (what < 210) {
            commit_again();
        } else if (what < 220) {
            make_room(take());
        } else if (what < 250) {
            compare_changes();
        } else if (what < 252) {
            pool_.reset();
            other_.reset();
        } else if (what < 254) {
            const BlockId id = take_id();
            require(succeeds([&] { pool_.forget({&id, 1}); }) == other_.forget_content(id), "forget");
        } else {
            pool_.check();
        }
        require(pool_.num_available() == other_.num_available(), "num_available");
        require(pool_.num_cached() == other_.by_name().size(), "num_cached");
    }

    // A sequence comes, with what is cached of it.
    void grow(const std::vector<Hash>& hashes) {
        Ids ids = pool_.match(hashes);
        require(ids == other_.match(hashes), "match");
        const std::size_t before = pool_.num_available();
        const std::size_t num_idle = pool_.count_idle(ids);
        pool_.acquire(ids);
        for (const BlockId id : ids) {
            require(other_.acquire(id), "what match found");
        }
        // A hash may come twice in a row of blocks; the block it names is then taken twice.
        require(before - pool_.num_available() <= num_idle, "count_idle");
        const auto more = pool_.allocate(hashes.size() - ids.size());
        require(more == other_.allocate(hashes.size() - ids.size()), "allocate");
        if (more) {
            ids.insert(ids.end(), more->begin(), more->end());
            if (take() % 4 > 0) {
                commit(ids, hashes);
            }
        }
        sequences_.push_back(std::move(ids));
    }

    // Chains, each from its first block on, the one unused for longest first: backwards they are the victims in order.
    void make_room(std::size_t count) {
        std::vector<Straightforward::Victim> victims = other_.make_room(count);
        std::ranges::reverse(victims);
        std::vector<penstock::GivenUp> given_up = pool_.make_room(count);
        std::ranges::reverse(given_up);
        auto victim = victims.begin();
        for (const penstock::GivenUp& chain : given_up) {
            std::optional<std::uint64_t> parent = chain.parent;
            for (std::size_t at = 0; at < chain.ids.size(); ++at, ++victim) {
                const Hash hash = chain.hashes[at];
                require(victim != victims.end() && victim->id == chain.ids[at], "a block that went");
                require(victim->name == Name(hash.low, hash.high) && victim->parent == parent, "its name or parent");
                parent = hash.low;
            }
        }
        require(victim == victims.end(), "how many went");
    }

    void end_one() {
        if (sequences_.empty()) {
            const BlockId id = take_id();
            require(succeeds([&] { pool_.release({&id, 1}); }) == other_.release(id), "release of one that is free");
            return;
        }
        const std::size_t index = take() % sequences_.size();
        std::swap(sequences_[index], sequences_.back());
        const Ids ids = std::move(sequences_.back());
        sequences_.pop_back();
        pool_.release(ids);
        for (std::size_t at = ids.size(); at-- > 0;) {
            require(other_.release(ids[at]), "release");
        }
    }

    void commit_again() {
        if (!sequences_.empty()) {
            const Ids& ids = sequences_[take() % sequences_.size()];
            commit(ids, take_hashes(ids.size()));
        }
    }

    void commit(const Ids& ids, const std::vector<Hash>& hashes) {
        const std::optional<std::uint64_t> parent = take() % 2 ? std::optional<std::uint64_t>(take()) : std::nullopt;
        require(succeeds([&] { pool_.commit(ids, hashes, parent); }) == other_.commit(ids, hashes, parent), "commit");
    }

    void compare_changes() {
        const std::vector<Change> changes = pool_.take_changes();
        require(std::ranges::equal(changes, other_.take_changes(),
                                   [](const Change& one, const Change& other) {
                                       return one.kind == other.kind && one.parent == other.parent &&
                                              one.hashes == other.hashes;
                                   }),
                "take_changes");
    }

    std::span<const std::uint8_t> bytes_;
    BlockId num_blocks_;
    penstock::Pool pool_;
    Straightforward other_;
    std::vector<Ids> sequences_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    Comparison(data, size).run();
    return 0;
}
