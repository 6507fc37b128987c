// The requests that wait for a simulated engine's batch, in order of turn: as they came, tenants in turns, or the shortest first.
//
// The oracles are the Python references in src/penstock/engine/scheduling/order: equal calls give equal answers.

#pragma once

#include <list>
#include <optional>
#include <set>
#include <tuple>
#include <vector>

#include "jump_sequence.hpp"
#include "jump_turns.hpp"

namespace penstock {

// Anyone can leave; one that is preempted comes back at the front.
class JumpQueue {
  public:
    bool empty() const { return waiting_.empty(); }
    Count size() const { return static_cast<Count>(waiting_.size()); }

    // Tokens that all of them have to compute, as far as no prefix is cached.
    Count num_tokens() const { return num_tokens_; }

    // Whether they have ranks: the shortest is first, or tenants take turns.
    bool is_ranked() const { return ageing_.has_value() || turns_.has_value(); }

    // Whether tenants take turns.
    bool has_turns() const { return turns_.has_value(); }

    // The one whose turn it is; there must be one, and ranked.
    JumpSequence& first() const { return is_ranked() ? *std::get<JumpSequence*>(*by_rank_.begin()) : *waiting_.front(); }

    // Have the shortest first from now on, less what waiting earns; nothing is as they came, and turns once there are several tenants.
    void reorder(std::optional<double> ageing);

    void push(JumpSequence& sequence);
    void push_front(JumpSequence& sequence);
    void remove(JumpSequence& sequence);

    // See whose turn it is, also of those that came last; `count` says how many tokens each lacks.
    template <class CountLacking>
    void rank_new(const CountLacking& count) {
        for (JumpSequence* sequence : new_) {
            place(*sequence, rank_of(*sequence, count(*sequence)));
        }
        new_.clear();
    }

    // Call `visit` with each in order of turn until it returns false; all must be ranked.
    template <class Visit>
    void visit_in_turn(const Visit& visit) const {
        if (!is_ranked()) {
            for (JumpSequence* sequence : waiting_) {
                if (!visit(*sequence)) {
                    return;
                }
            }
            return;
        }
        for (const auto& [rank, number, sequence] : by_rank_) {
            if (!visit(*sequence)) {
                return;
            }
        }
    }

    // The rank of one that lacks so many tokens, whether it waits or runs; only where they have ranks.
    double rank_of(JumpSequence& sequence, Count lacking);

    // Note that a step leaves a prompt so many tokens to compute.
    void note(const JumpSequence& sequence, Count left) {
        if (turns_) {
            turns_->note(sequence, left);
        }
    }

    // Note that no prompt waits or is under way.
    void level() {
        if (turns_) {
            turns_->level();
        }
    }

    // Throws Broken where the state contradicts itself.
    void check() const;

  private:
    using Ranked = std::tuple<double, Count, JumpSequence*>;

    void rank_all();
    void add(JumpSequence& sequence, std::list<JumpSequence*>::const_iterator before);
    void place(JumpSequence& sequence, double rank);

    std::list<JumpSequence*> waiting_;
    Count num_tokens_ = 0;
    std::optional<double> ageing_;
    std::optional<JumpTurns> turns_;
    std::optional<std::uint64_t> tenant_; // of the last one
    std::vector<JumpSequence*> new_; // what they lack is not known yet
    std::set<Ranked> by_rank_;           // (rank, number, itself) of the others
};

}  // namespace penstock
