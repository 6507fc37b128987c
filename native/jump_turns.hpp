// Turns of tenants in a simulated engine: start-time fair queueing by chunks of prompts.
//
// The oracle is the Python reference in src/penstock/engine/scheduling/order.py: equal calls give equal answers.

#pragma once

#include <algorithm>
#include <cstdint>
#include <list>
#include <unordered_map>
#include <utility>

#include "jump_sequence.hpp"

namespace penstock {

class JumpTurns {
  public:
    static constexpr Count kTurnTokens = 2048; // most of one prompt in a step

    // Begin with one tenant's requests, which have all been served equally.
    explicit JumpTurns(std::uint64_t tenant) { set(tenant, 0); }

    double rank(JumpSequence& sequence, Count lacking) {
        const auto tokens = static_cast<double>(lacking);
        if (!sequence.turn_end) {
            const auto found = clocks_.find(sequence.use.tenant);
            const double clock = found == clocks_.end() ? floor_ : found->second->second;
            const double start = std::max(clock, ahead_ - kCreditTokens);
            sequence.turn_end = start + tokens;
            set(sequence.use.tenant, start + tokens);
        }
        return *sequence.turn_end - tokens;
    }

    // Note that a step leaves a prompt so many tokens to compute.
    void note(const JumpSequence& sequence, Count left) {
        if (sequence.turn_end) {
            ahead_ = std::max(ahead_, *sequence.turn_end - static_cast<double>(left));
        }
    }

    // Set all clocks to the one that is ahead: no prompt is left.
    void level() {
        for (const Clock& clock : moved_) {
            ahead_ = std::max(ahead_, clock.second);
        }
        floor_ = moved_.empty() ? floor_ : ahead_;
        clocks_.clear();
        moved_.clear();
    }

  private:
    static constexpr double kCreditTokens = 32'768;
    static constexpr std::size_t kTenantsMax = 1024;
    using Clock = std::pair<std::uint64_t, double>;

    void set(std::uint64_t tenant, double clock) {
        if (const auto found = clocks_.find(tenant); found != clocks_.end()) {
            moved_.erase(found->second);
        }
        clocks_[tenant] = moved_.insert(moved_.end(), {tenant, clock});
        if (clocks_.size() > kTenantsMax) {
            clocks_.erase(moved_.front().first);
            moved_.pop_front();
        }
    }

    std::list<Clock> moved_; // the one that moved last is the last
    std::unordered_map<std::uint64_t, std::list<Clock>::iterator> clocks_;
    double ahead_ = 0;
    double floor_ = 0; // where the clock of a tenant begins that has none
};

}  // namespace penstock
