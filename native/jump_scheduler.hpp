// The requests of a simulated engine that jumps: many decode steps are one commit.
//
// The oracle is the exact engine, which runs every step: src/penstock/sim/engine.py.

#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "jump_batch.hpp"
#include "jump_queue.hpp"
#include "jump_tiers.hpp"
#include "pool.hpp"

namespace penstock {

// A request as it arrives. `number` counts arrivals; `hashes` are names that came with it, of its leading blocks.
struct Arrival {
    Count number;
    Count known; // tokens, those that it was answered elsewhere included
    Count num_prompt;
    Count end_tokens;
    bool kv_transfer; // its KV goes to another worker, which is told how far its prompt is
    std::vector<Hash> hashes;
    std::unique_ptr<const Names> names;
    BlockUse use = {}; // what it uses its blocks for; its end comes `ttl_s` after the request's
    double ttl_s = std::numeric_limits<double>::infinity();
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

// What came of a plan: output tokens, the requests with a KV transfer whose prompts went on and are not finished, and
// whether there is anything to report.
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
    Count prefetched; // next requests of the queue that hold what is cached of them
    std::vector<std::pair<Count, Count>> windows = {}; // (tokens, layers) of each sliding window with blocks of its own
    Count whole_layers = 1; // layers without a window, whose KV is that of a block
};

// Owns the requests. The caller owns the pool and the tiers below it; `tiers` is nullptr without any. Each plan is
// committed before the next is made.
class JumpScheduler {
  public:
    JumpScheduler(Pool& pool, Count block_size, JumpLimits limits, JumpTiers* tiers);
    JumpScheduler(const JumpScheduler&) = delete;
    JumpScheduler& operator=(const JumpScheduler&) = delete;

    Count num_waiting() const { return waiting_.size(); }

    // Compute the shortest prompt first from now on, less what waiting earns for each token computed; nothing is as they
    // came.
    void reorder(std::optional<double> ageing);

    // The time of what follows: uses of blocks end a while after it.
    void set_now(double now_s) { now_s_ = now_s; }

    // Queue a request; numbers ascend.
    void submit(Arrival arrival);

    // Forget a request; a running one's blocks are free with the next commit or plan.
    void abort(Count number);

    // Whether the next plan may differ from going on: a request may be admitted, or has left.
    bool wants_plan() const { return !aborted_.empty() || may_admit() || may_hold(); }

    // Note that blocks were given back, or have come: the first that waits may fit now.
    void look_again() {
        head_blocked_ = false;
        may_look_ = true;
    }

    // Count the blocks that running requests will need soon: for the rest of their prefill and one more each. `steps` is
    // 2 while decoding requests lack the blocks of the coming step.
    Count blocks_reserved(Count steps = 1) const;

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
    Count blocks_of(Count tokens) const { return (tokens + size_ - 1) / size_; }
    bool may_admit() const;
    std::pair<Count, Count> step_limits() const;
    Count share_budget(Count budget);
    void grow();
    void extend(const std::vector<Share>& lacking);
    Count share_by_rank(Count budget, std::vector<Share>& admitted);
    using Ahead = std::vector<std::pair<Count, Count>>;
    // What is cached of a waiting sequence: blocks on the device, how many in lower tiers are worth loading, and for how
    // many of these a load is under way.
    struct Cached {
        std::vector<BlockId> hits;
        Count num_lower = 0;
        Count num_targets = 0;
    };

    Count window_blocks(Count tokens, Count step_tokens) const;
    Count windows_of(const JumpSequence& sequence, Count num_cached) const;
    void end_chunks(JumpSequence& sequence);
    Count lacking(JumpSequence& sequence) const;
    Cached match(JumpSequence& sequence, const Ahead& ahead = {}) const;
    bool may_hold() const;
    Ahead prompts_left() const;
    void hold_next();
    void hold(JumpSequence& sequence, const Ahead& ahead);
    void end_overtaken(const std::vector<JumpSequence*>& upcoming);
    std::vector<BlockId> pass_on(JumpSequence& sequence);
    void end_hold(JumpSequence& sequence);
    bool give_way(const JumpSequence* first = nullptr);
    void unhold(JumpSequence& sequence);
    Count admit(Count budget, std::vector<Share>& admitted, std::optional<double> before = {});
    void take_in(JumpSequence& sequence, Cached cached, Count windows);
    void take_arrived();
    void take_held(JumpSequence& sequence, const std::vector<BlockId>& come);
    Count longest_jump() const;
    void preempt(JumpSequence& sequence);
    void take_prompt(JumpSequence& sequence, Count amount);
    void publish(JumpSequence& sequence, Count computed);
    void leave(JumpSequence& sequence, bool comes_back = false);
    void drop_aborted();
    Told tell(JumpSequence& sequence, Count known, bool is_end);

    Pool& pool_;
    Count size_;
    JumpLimits limits_;
    JumpTiers* tiers_;
    JumpBatch batch_;
    std::unordered_map<Count, std::unique_ptr<JumpSequence>> sequences_;
    JumpQueue waiting_;
    double now_s_ = 0; // when blocks are given back
    Count clock_tokens_ = 0; // of prompts, computed so far, as the exact scheduler counts: a last token is decoding's
    std::vector<JumpSequence*> holding_; // those that wait and hold what is cached of them, the newest last
    Count num_taken_ = 0; // blocks that they alone hold
    bool may_look_ = false; // more of those that wait may hold something
    bool head_blocked_ = false; // the first that waits found no room, and nothing was given back since
    std::vector<JumpSequence*> aborted_; // those that run
    std::vector<Share> prompts_; // of the plan
    Count num_singles_ = 0; // of those, the ones that lack only their last token
    std::vector<Told> untold_;
    Count steps_ = 0;
    Count preemptions_ = 0;
    Count prefilled_tokens_ = 0;
    Count prefix_hit_tokens_ = 0;
    Count generated_tokens_ = 0;
};

}  // namespace penstock
