// The running requests of a simulated engine, kept so that many decode steps at once cost no more than one.
//
// The oracle is the exact engine, which runs every step: src/penstock/sim/engine.py.

#pragma once

#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "jump_sequence.hpp"

namespace penstock {

// A tick is a decode step. Who decodes is known by where it stood when it joined: each tick adds a token to all. Who
// begins a block when is a list sorted by phase, so that many ticks cost no more than one.
class JumpBatch {
  public:
    explicit JumpBatch(Count block_size) : size_(block_size) {}

    // Oldest arrival first.
    const std::vector<JumpSequence*>& running() const { return running_; }

    // Those of them whose prompt is not computed yet, oldest arrival first.
    const std::vector<JumpSequence*>& prefilling() const { return prefilling_; }

    // Those of them that wait for blocks of lower tiers.
    const std::vector<JumpSequence*>& onboarding() const { return onboarding_; }

    Count num_running() const { return size_of(running_); }
    Count num_decoding() const { return size_of(phases_); }
    Count tick() const { return tick_; }
    void advance(Count steps) { tick_ += steps; }

    // Sum the tokens of all that decode, at a tick.
    Count context_tokens(Count tick) const { return context_ + num_decoding() * tick; }

    // Count the blocks that those who decode need for so many steps.
    Count blocks_due(Count first_tick, Count steps) const;

    // Add those that need more blocks for so many steps, and how many.
    void add_beginning(std::vector<Share>& lacking, Count first_tick, Count steps) const;

    // Take a sequence in, to have its prompt computed.
    void admit(JumpSequence& sequence);

    // Take a sequence in that waits for blocks of lower tiers.
    void admit_to_onboard(JumpSequence& sequence);

    // Have a sequence's prompt computed from now on: its blocks of lower tiers are there.
    void end_onboarding(JumpSequence& sequence);

    // Have a sequence decode from now on: its prompt has given the first token.
    void join(JumpSequence& sequence);

    // Note that nobody wants its answer any more; it is taken out later.
    void abort(JumpSequence& sequence);

    // Take a sequence out. `known` is what it has now, and `computed` one less where it decoded.
    void leave(JumpSequence& sequence);

    // The tick after which the next one that decodes ends; there must be one.
    Count next_end() const { return std::get<0>(*ends_.begin()); }

    // One that has all its tokens, for the caller to take out before it asks again; nullptr without any.
    JumpSequence* ended() const;

    // Throws Broken where the state contradicts itself.
    void check() const;

  private:
    struct Phase {
        Count begins_at; // ticks, modulo the block size, at which it begins a block
        Count number;
        JumpSequence* sequence;
    };
    using Span = std::pair<std::size_t, std::size_t>;
    using End = std::tuple<Count, Count, JumpSequence*>;

    static End end_of(JumpSequence& sequence) { return {sequence.end_tick(), sequence.number, &sequence}; }
    Count begins_at(const JumpSequence& sequence) const;
    std::vector<Phase>::const_iterator phase_of(const JumpSequence& sequence) const;
    std::vector<Span> spans(Count first_tick, Count length) const;

    Count size_;
    std::vector<JumpSequence*> running_;
    std::vector<JumpSequence*> prefilling_;
    std::vector<JumpSequence*> onboarding_;
    std::vector<Phase> phases_; // of those that decode, sorted
    std::set<End> ends_; // (tick, number, itself), of those that decode and were not aborted
    Count tick_ = 0;
    Count context_ = 0; // over those that decode: known - joined
};

}  // namespace penstock
