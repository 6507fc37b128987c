// The requests of a simulated engine that jumps: many decode steps are one commit.
//
// The oracle is the Python twin in src/penstock/sim/scheduler.py: equal calls give equal answers.

#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "pool.hpp"

namespace penstock {

using Count = std::int64_t;

// Names a request's blocks, of its prompt and of what it will be answered.
class Names {
  public:
    virtual ~Names() = default;

    // Blocks `start` to `end`.
    virtual std::vector<Hash> between(Count start, Count end) const = 0;
};

// A request as it arrives. `number` counts arrivals; `hashes` are names that came with it, of its leading blocks.
struct Arrival {
    Count number;
    Count known; // tokens, those that it was answered elsewhere included
    Count num_prompt;
    Count end_tokens;
    bool hand_over; // others want to hear how far its prompt is
    std::vector<Hash> hashes;
    std::unique_ptr<const Names> names;
};

// What comes next: `steps` decode steps, or one step that computes parts of prompts beside decoding.
//
// `batch` and `context` are of what decodes and of those prompts that lack only one token, which costs the same;
// `chunks` are of the others: (tokens to compute, tokens before them).
struct Jump {
    Count steps;
    Count batch;
    Count context;
    bool has_prompts;
    std::vector<std::pair<Count, Count>> chunks;
};

// Output tokens `begin` to `end` of a request; `cached_tokens` with the first of them, `is_end` with the last.
struct Told {
    Count number;
    Count begin;
    Count end;
    bool is_end;
    std::optional<Count> cached_tokens;
};

// What came of a plan: output tokens, the requests to be handed over whose prompts went on and are not done, and
// whether anybody has to hear of it.
struct Committed {
    std::vector<Told> told;
    std::vector<Count> prefilling;
    bool has_news;
};

struct JumpLoad {
    Count running;
    Count waiting;
    Count active_blocks;
    Count queued_prefill_tokens;
    Count context_tokens;
    Count steps;
    Count preemptions;
    Count prefilled_tokens;
    Count prefix_hit_tokens;
    Count generated_tokens;
};

struct JumpLimits {
    Count max_batch_tokens;
    Count prompt_budget; // of one prompt in one step
    Count max_running;
};

// Owns the requests; the pool is its caller's. A plan is committed before the next is made.
//
// A tick is a decode step. Who decodes is known by where it stood when it joined: each tick adds a token to all. Who
// begins a block when is a list sorted by phase, so that many ticks cost no more than one.
class JumpScheduler {
  public:
    JumpScheduler(Pool& pool, Count block_size, JumpLimits limits);
    JumpScheduler(const JumpScheduler&) = delete;
    JumpScheduler& operator=(const JumpScheduler&) = delete;

    Count num_waiting() const { return static_cast<Count>(waiting_.size()); }

    // Queue a request; numbers ascend.
    void submit(Arrival arrival);

    // Forget a request; a running one's blocks are free with the next commit or plan.
    void abort(Count number);

    // Whether the next plan may differ from going on: somebody may be taken in, or has gone.
    bool wants_plan() const { return !aborted_.empty() || may_admit(); }

    // Note that blocks were given back, or have come: the first that waits may fit now.
    void look_again() { head_blocked_ = false; }

    // Count the blocks that those who run will need soon: for the rest of their prefill and one more each.
    Count blocks_reserved() const;

    // Choose what comes next; nothing while there is nothing to do.
    std::optional<Jump> plan();

    // Take over the first steps of the plan.
    Committed commit(Count steps);

    // Take over the first decode steps of the plan while the next one is under way: it has its blocks then.
    void settle(Count steps);

    // Give the tokens of all that decode which were not told yet.
    std::vector<Told> so_far();

    // Say how busy it is once so many steps of the plan under way are done.
    JumpLoad load(Count steps) const;

    // Blocks with how many of the requests hold each, ascending.
    std::vector<std::pair<BlockId, std::int32_t>> held() const;

    // Throws Broken where the state contradicts itself.
    void check() const;

  private:
    struct Sequence {
        Count number;
        Count known; // its tokens; while it decodes, those at tick `joined`, and one more each tick since
        Count num_prompt;
        Count end_tokens;
        Count told; // output tokens that went out
        bool hand_over;
        std::vector<Hash> hashes; // of its leading blocks, as far as they were needed
        std::unique_ptr<const Names> names;
        Count computed = 0; // tokens whose KV is there, while its prompt is computed
        std::optional<Count> joined = {};
        std::vector<BlockId> blocks = {};
        Count published = 0; // its leading blocks that are in the prefix cache
        std::optional<std::uint64_t> parent = {}; // low half of the last of those
        std::optional<Count> cached_tokens = {};
        bool is_fresh = true; // nothing was told yet
        bool is_aborted = false;
        std::optional<std::list<Sequence*>::iterator> place = {}; // while it waits

        Count lacking() const { return known - computed; }
        Count end_tick() const { return *joined + end_tokens - known; }
    };
    struct Phase {
        Count begins_at; // ticks, modulo the block size, at which it begins a block
        Count number;
        Sequence* sequence;
    };
    struct Share {
        Sequence* sequence;
        Count amount;
    };
    using Span = std::pair<std::size_t, std::size_t>;

    Count blocks_of(Count tokens) const { return (tokens + size_ - 1) / size_; }
    bool may_admit() const;
    Count share_budget(Count budget);
    void grow();
    void extend(const std::vector<Share>& lacking);
    void admit(Count budget);
    void take_in(Sequence& sequence, std::vector<BlockId> hits);
    Count longest_jump() const;
    void preempt(Sequence& sequence);
    void take_prompt(Sequence& sequence, Count amount);
    void publish(Sequence& sequence, Count computed);
    void name(Sequence& sequence, Count count) const;
    void leave(Sequence& sequence);
    void drop_aborted();
    Told tell(Sequence& sequence, Count known, bool is_end);

    void join(Sequence& sequence);
    void leave_batch(Sequence& sequence);
    Count begins_at(const Sequence& sequence) const;
    std::vector<Phase>::const_iterator phase_of(const Sequence& sequence) const;
    std::vector<Span> spans(Count first_tick, Count length) const;
    Count blocks_due(Count first_tick, Count steps) const;
    void add_beginning(std::vector<Share>& lacking, Count first_tick, Count steps) const;
    Count context_tokens(Count tick) const { return context_ + static_cast<Count>(phases_.size()) * tick; }

    Pool& pool_;
    Count size_;
    JumpLimits limits_;
    std::unordered_map<Count, std::unique_ptr<Sequence>> sequences_;
    std::list<Sequence*> waiting_;
    Count waiting_tokens_ = 0;
    bool head_blocked_ = false; // the first that waits found no room, and nothing was given back since
    std::vector<Sequence*> aborted_; // those that run
    std::vector<Sequence*> running_; // oldest arrival first
    std::vector<Sequence*> prefilling_; // of them, oldest arrival first
    std::vector<Phase> phases_; // of those that decode, sorted
    std::set<std::pair<Count, Count>> ends_; // (tick, number), of those that decode and were not aborted
    std::vector<Share> prompts_; // of the plan
    std::vector<Told> untold_;
    Count tick_ = 0;
    Count context_ = 0; // over those that decode: known - joined
    Count steps_ = 0;
    Count preemptions_ = 0;
    Count prefilled_tokens_ = 0;
    Count prefix_hit_tokens_ = 0;
    Count generated_tokens_ = 0;
};

}  // namespace penstock
