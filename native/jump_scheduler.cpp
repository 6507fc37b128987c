#include "jump_scheduler.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <string>

namespace penstock {
JumpScheduler::JumpScheduler(Pool& pool, Count block_size, JumpLimits limits, JumpTiers* tiers)
    : pool_(pool), size_(block_size), limits_(std::move(limits)), tiers_(tiers), batch_(block_size) {}

void JumpScheduler::reorder(std::optional<double> ageing) {
    waiting_.reorder(ageing);
    look_again();
}

// ---- Requests in and out

void JumpScheduler::submit(Arrival arrival) {
    auto sequence = std::make_unique<JumpSequence>(
        JumpSequence{arrival.number, arrival.known, arrival.num_prompt, arrival.end_tokens,
                     arrival.known - arrival.num_prompt, arrival.kv_transfer, std::move(arrival.hashes),
                     std::move(arrival.names), arrival.use, arrival.ttl_s});
    sequence->since_tokens = clock_tokens_;
    waiting_.push(*sequence);
    may_look_ = true;
    if (waiting_.is_ranked()) {
        head_blocked_ = false; // it may be the first now
    }
    sequences_[arrival.number] = std::move(sequence);
}

void JumpScheduler::abort(Count number) {
    const auto found = sequences_.find(number);
    if (found == sequences_.end() || found->second->is_aborted) {
        return;
    }
    JumpSequence& sequence = *found->second;
    head_blocked_ = false;
    if (sequence.place) {
        waiting_.remove(sequence);
        end_hold(sequence);
        may_look_ = true;
        sequences_.erase(found);
        return;
    }
    batch_.abort(sequence);
    aborted_.push_back(&sequence);
}

// ---- Plans

// Most tokens of a step, and of one prompt in it; fewer while tenants take turns, since no prompt overtakes another within a step.
std::pair<Count, Count> JumpScheduler::step_limits() const {
    Count prompt = limits_.prompt_budget;
    const Count at_once = std::max<Count>(limits_.max_batch_tokens / prompt, 1);
    if (waiting_.has_turns()) {
        prompt = std::min(prompt, std::max(JumpTurns::kTurnTokens, (2 * limits_.max_running + at_once - 1) / at_once));
    }
    return {prompt == limits_.prompt_budget ? limits_.max_batch_tokens : prompt * at_once, prompt};
}

std::optional<Jump> JumpScheduler::plan() {
    drop_aborted();
    take_arrived();
    prompts_.clear();
    if (waiting_.empty() && std::ranges::all_of(batch_.prefilling(), [](const JumpSequence* each) { return each->lacking() == 1; })) {
        waiting_.level();
    }
    std::vector<Share> admitted;
    Count budget = step_limits().first - batch_.num_decoding();
    if (!batch_.prefilling().empty()) {
        budget = waiting_.is_ranked() ? share_by_rank(budget, admitted) : share_budget(budget);
    }
    const Count num_running = batch_.num_running();
    grow();
    const bool is_short = batch_.num_running() < num_running;
    if (is_short) {
        std::erase_if(prompts_, [](const Share& prompt) { return prompt.sequence->blocks.empty(); });
    }
    Jump jump{1, batch_.num_decoding(), batch_.context_tokens(batch_.tick()), false, {}};
    for (const auto& [sequence, amount] : prompts_) {
        if (sequence->lacking() == 1) {
            ++jump.batch;
            jump.context += sequence->known;
        } else {
            jump.chunks.emplace_back(amount, sequence->computed);
        }
    }
    num_singles_ = jump.batch - batch_.num_decoding();
    if (!is_short) {
        admit(budget, admitted);
        hold_next();
    }
    for (const auto& [sequence, amount] : admitted) {
        jump.chunks.emplace_back(amount, sequence->computed);
    }
    prompts_.insert(prompts_.end(), admitted.begin(), admitted.end());
    jump.has_prompts = !prompts_.empty();
    if (!jump.has_prompts && batch_.num_decoding() == 0) {
        return std::nullopt;
    }
    if (!jump.has_prompts && !may_admit() && !may_hold()) { // who was preempted just now may be taken in again with the next step
        jump.steps = longest_jump();
    }
    return jump;
}

// Give every running sequence the blocks of its next step; the newest are preempted where none are left.
void JumpScheduler::grow() {
    std::vector<Share> lacking;
    for (const auto& [sequence, amount] : prompts_) {
        lacking.push_back({sequence, blocks_of(sequence->computed + amount) - size_of(sequence->blocks)});
    }
    batch_.add_beginning(lacking, batch_.tick(), 1);
    Count total = 0;
    for (const Share& share : lacking) {
        total += share.amount;
    }
    if (total <= static_cast<Count>(pool_.num_available())) {
        extend(lacking);
        return;
    }
    for (JumpSequence* sequence : std::vector(batch_.running())) {
        const auto need = std::ranges::find(lacking, sequence, &Share::sequence);
        while (need != lacking.end() && need->amount > 0 && !sequence->blocks.empty()) {
            if (need->amount <= static_cast<Count>(pool_.num_available())) {
                extend({*need});
                break;
            }
            if (give_way()) {
                continue;
            }
            preempt(*batch_.running().back());
        }
    }
}

// Give sequences so many more blocks each; they are there.
void JumpScheduler::extend(const std::vector<Share>& lacking) {
    Count total = 0;
    for (const Share& share : lacking) {
        total += share.amount;
    }
    if (total == 0) {
        return;
    }
    const auto taken = pool_.allocate(at(total));
    require(taken.has_value(), "blocks: fewer are there than were counted");
    auto next = taken->begin();
    for (const auto& [sequence, amount] : lacking) {
        sequence->blocks.insert(sequence->blocks.end(), next, next + amount);
        next += amount;
    }
}

// Count the steps until a request ends, or blocks run out; those of the first step are there already.
Count JumpScheduler::longest_jump() const {
    const auto available = static_cast<Count>(pool_.num_available());
    const Count steps = batch_.next_end() - batch_.tick();
    if (batch_.blocks_due(batch_.tick() + 1, steps - 1) <= available) {
        return steps;
    }
    Count low = 1; // so many are possible
    Count high = steps; // and so many are not
    while (high - low > 1) {
        const Count middle = std::midpoint(low, high);
        (batch_.blocks_due(batch_.tick() + 1, middle - 1) <= available ? low : high) = middle;
    }
    return low;
}

// Put a running sequence back to the front of the queue.
void JumpScheduler::preempt(JumpSequence& sequence) {
    leave(sequence, true);
    waiting_.push_front(sequence);
    ++preemptions_;
}

// ---- Commits

Committed JumpScheduler::commit(Count steps) {
    Committed committed{};
    if (steps > 1) { // the first one's blocks are there
        std::vector<Share> lacking;
        batch_.add_beginning(lacking, batch_.tick() + 1, steps - 1);
        extend(lacking);
    }
    steps_ += steps;
    generated_tokens_ += steps * batch_.num_decoding();
    batch_.advance(steps);
    for (const auto& [sequence, amount] : prompts_) {
        take_prompt(*sequence, amount);
        clock_tokens_ += amount;
        if (sequence->kv_transfer && !sequence->joined && !sequence->is_aborted) {
            committed.prefilling.push_back(sequence->number);
        }
    }
    clock_tokens_ -= num_singles_;
    while (JumpSequence* sequence = batch_.ended()) {
        leave(*sequence);
        untold_.push_back(tell(*sequence, sequence->known, true));
        sequences_.erase(sequence->number);
    }
    committed.has_news = !untold_.empty() || !aborted_.empty() || !prompts_.empty();
    prompts_.clear();
    drop_aborted();
    committed.told = std::exchange(untold_, {});
    return committed;
}

void JumpScheduler::settle(Count steps) {
    std::vector<Share> lacking;
    batch_.add_beginning(lacking, batch_.tick() + 1, steps);
    extend(lacking);
    steps_ += steps;
    generated_tokens_ += steps * batch_.num_decoding();
    batch_.advance(steps);
}

std::vector<Told> JumpScheduler::so_far() {
    for (JumpSequence* sequence : batch_.running()) {
        if (sequence->joined && !sequence->is_aborted) {
            untold_.push_back(tell(*sequence, sequence->known + batch_.tick() - *sequence->joined, false));
        }
    }
    return std::exchange(untold_, {});
}

void JumpScheduler::take_prompt(JumpSequence& sequence, Count amount) {
    sequence.computed += amount;
    prefilled_tokens_ += amount;
    publish(sequence, sequence.computed);
    if (sequence.lacking() > 0 || sequence.is_aborted) {
        return;
    }
    end_chunks(sequence);
    batch_.join(sequence);
    ++generated_tokens_;
    if (sequence.known < sequence.end_tokens) {
        untold_.push_back(tell(sequence, sequence.known, false));
    }
}

// Put the blocks that are complete into the prefix cache.
void JumpScheduler::publish(JumpSequence& sequence, Count computed) {
    const Count start = sequence.published;
    const Count end = computed / size_;
    if (end <= start) {
        return;
    }
    std::vector<Hash> others; // names past those that came with it are needed once: they are not kept
    std::span<const Hash> hashes;
    if (start >= size_of(sequence.hashes)) {
        others = sequence.names->between(start, end);
        hashes = others;
    } else {
        sequence.name(end);
        hashes = std::span(sequence.hashes).subspan(at(start), at(end - start));
    }
    pool_.commit(std::span(sequence.blocks).subspan(at(start), at(end - start)), hashes, sequence.parent);
    sequence.published = end;
    sequence.parent = hashes.back().low;
}

// Take a sequence out of the batch, and give its blocks back; one that does not come back has used them.
void JumpScheduler::leave(JumpSequence& sequence, bool comes_back) {
    batch_.leave(sequence);
    if (tiers_ != nullptr) {
        tiers_->cancel(sequence.number);
    }
    publish(sequence, sequence.computed);
    if (tiers_ != nullptr && sequence.published > 0) {
        sequence.name(sequence.published);
        tiers_->offload(std::span(sequence.hashes).first(at(sequence.published)));
    }
    sequence.blocks.insert(sequence.blocks.end(), sequence.windows.begin(), sequence.windows.end());
    if (comes_back) {
        pool_.release(sequence.blocks);
    } else {
        sequence.use.until_s = now_s_ + sequence.ttl_s;
        pool_.release(sequence.blocks, sequence.use);
    }
    sequence.blocks.clear();
    sequence.windows.clear();
    sequence.published = sequence.computed = 0;
    sequence.parent.reset();
    look_again();
}

void JumpScheduler::drop_aborted() {
    for (JumpSequence* sequence : aborted_) {
        leave(*sequence);
        sequences_.erase(sequence->number);
    }
    aborted_.clear();
}

// Send the output tokens up to `known` that were not sent.
Told JumpScheduler::tell(JumpSequence& sequence, Count known, bool is_end) {
    const Count begin = std::exchange(sequence.told, known - sequence.num_prompt);
    const bool is_first = std::exchange(sequence.is_fresh, false);
    return {sequence.number, begin, sequence.told, is_end, is_first ? sequence.cached_tokens : std::nullopt};
}

// ---- What it says of itself

JumpLoad JumpScheduler::load(Count steps) const {
    Count queued = waiting_.num_tokens();
    Count context = batch_.context_tokens(batch_.tick() + steps);
    for (const JumpSequence* sequence : batch_.prefilling()) {
        queued += sequence->lacking();
        context += sequence->computed;
    }
    for (const JumpSequence* sequence : batch_.onboarding()) {
        queued += sequence->known - size_of(sequence->blocks) * size_;
        context += sequence->computed;
    }
    return {
        .running = batch_.num_running(),
        .waiting = num_waiting(),
        .active_blocks = static_cast<Count>(pool_.num_active()) - num_taken_ + batch_.blocks_due(batch_.tick() + 1, steps),
        .queued_prefill_tokens = queued,
        .context_tokens = context,
        .steps = steps_ + steps,
        .preemptions = preemptions_,
        .prefilled_tokens = prefilled_tokens_,
        .prefix_hit_tokens = prefix_hit_tokens_,
        .generated_tokens = generated_tokens_ + steps * batch_.num_decoding(),
    };
}

std::vector<std::pair<BlockId, std::int32_t>> JumpScheduler::held() const {
    std::map<BlockId, std::int32_t> counts;
    for (const JumpSequence* sequence : batch_.running()) {
        for (const auto* blocks : {&sequence->blocks, &sequence->windows}) {
            for (const BlockId id : *blocks) {
                ++counts[id];
            }
        }
    }
    for (const JumpSequence* sequence : holding_) {
        for (const auto* blocks : {&sequence->held, &sequence->targets}) {
            for (const BlockId id : *blocks) {
                ++counts[id];
            }
        }
    }
    return {counts.begin(), counts.end()};
}

void JumpScheduler::check() const {
    batch_.check();
    waiting_.check();
    const auto num_sequences = static_cast<Count>(sequences_.size());
    require(waiting_.size() + batch_.num_running() == num_sequences, "sequences: each waits or runs");
    require(batch_.num_running() <= limits_.max_running, "running: bounded");
    require(size_of(holding_) <= limits_.prefetched, "holding: bounded");
    Count num_taken = 0;
    for (const JumpSequence* sequence : holding_) {
        require(sequence->place && sequence->is_held, "holding: those that wait");
        num_taken += sequence->num_taken;
    }
    require(num_taken == num_taken_, "holding: blocks summed up");
}

}  // namespace penstock
