// SPDX-License-Identifier: Apache-2.0
#include "dispatch.hpp"

namespace adaptra {

int reference_index(const Problem& problem, int group, int chunk, int micro_batch) {
    if (problem.chunks == 1) return micro_batch;
    const int first = micro_batch / group * group;
    const int size = std::min(group, problem.micro_batches - first);
    return first * problem.chunks + chunk * size + (micro_batch - first);
}

int least_cap(const Problem& problem, int group) {
    // Backwards run in the same groups with the chunks reversed; the first of a group waits for the most forwards.
    int needed = 1;
    for (int first = 0; first < problem.micro_batches; first += group) {
        const int forward = reference_index(problem, group, problem.chunks - 1, first);
        needed = std::max(needed, forward + 1 - first * problem.chunks);
    }
    return needed;
}

int largest_group(const Problem& problem) {
    const double cap = *std::min_element(problem.cap.begin(), problem.cap.end());
    for (int group = std::min(problem.stages, problem.micro_batches); group > 0; --group) {
        if (least_cap(problem, group) <= cap + kCapTolerance) return group;
    }
    return 0;
}

double Dispatcher::run(const Policy& policy) {
    policy_ = policy;
    const int needed = least_cap(problem_, policy.group);
    for (double cap : policy.cap) {
        if (cap + kCapTolerance < needed) return kNever;
    }
    reset();
    const std::size_t actions = problem_.slots() * (policy.split ? 3 : 2);
    double makespan = 0.0;
    for (std::size_t done = 0; done < actions; ++done) {
        const int stage = winner_[1];
        if (choice_[stage].time == kNever) return kNever;
        start_action(stage, choice_[stage]);
        makespan = std::max(makespan, state_[stage].free);
    }
    return makespan;
}

void Dispatcher::reset() {
    const int stages = problem_.stages;
    messages_.reset(problem_);
    state_.assign(stages, Stage{});
    next_forward_.assign(problem_.virtual_stages(), 0);
    next_backward_.assign(problem_.virtual_stages(), 0);
    choice_.assign(stages, Choice{});
    orders_.resize(stages);
    start_.resize(stages);
    end_.resize(stages);
    weight_queue_.resize(stages);
    for (int stage = 0; stage < stages; ++stage) {
        orders_[stage].clear();
        start_[stage].clear();
        end_[stage].clear();
        weight_queue_[stage].clear();
    }
    for (int v = 0; v < problem_.virtual_stages(); ++v) {
        const int row = problem_.row(v);
        state_[problem_.stage_of(v)].work +=
            problem_.micro_batches *
            (problem_.forward[row] + problem_.backward_input[row] + problem_.backward_weight[row]);
    }
    leaves_ = 1;
    while (leaves_ < stages) leaves_ *= 2;
    // Leaves beyond the last stage stand for it: every node that joins them with real leaves has it below too.
    winner_.assign(2 * leaves_, stages - 1);
    for (int stage = 0; stage < stages; ++stage) winner_[leaves_ + stage] = stage;
    for (int stage = stages - 1; stage >= 0; --stage) update(stage);
}

bool Dispatcher::within_cap(const Stage& state, int stage, int index) const {
    const int charged = std::max(index, state.highest) + 1;
    return held(charged, state.inputs, state.weights, policy_.released) <= policy_.cap[stage] + kCapTolerance;
}

double Dispatcher::urgency(Kind kind, int slot) const {
    if (policy_.urgency == nullptr) return kind == kForward ? 1.0 : kind == kBackwardWeight ? 0.0 : 2.0;
    if (kind == kForward) return policy_.urgency->forward[slot];
    return kind == kBackwardWeight ? policy_.urgency->weight[slot] : policy_.urgency->backward[slot];
}

Dispatcher::Choice Dispatcher::next_backward(int stage) const {
    const Kind kind = policy_.split ? kBackwardInput : kBackward;
    Choice best;
    int best_index = 0;
    for (int chunk = problem_.chunks - 1; chunk >= 0; --chunk) {
        const int virtual_stage = chunk * problem_.stages + stage;
        const int micro_batch = next_backward_[virtual_stage];
        if (micro_batch == problem_.micro_batches) continue;
        const int slot = virtual_stage * problem_.micro_batches + micro_batch;
        if (messages_.gradient[slot] == kNever) continue;
        const double time = std::max(state_[stage].free, messages_.gradient[slot]);
        const int index = reference_index(problem_, policy_.group, problem_.chunks - 1 - chunk, micro_batch);
        if (time < best.time || (time == best.time && index < best_index)) {
            best = {time, problem_.code(kind, chunk, micro_batch), urgency(kind, slot)};
            best_index = index;
        }
    }
    return best;
}

Dispatcher::Choice Dispatcher::next_forward(int stage) const {
    Choice best;
    int best_index = 0;
    for (int chunk = 0; chunk < problem_.chunks; ++chunk) {
        const int virtual_stage = chunk * problem_.stages + stage;
        const int micro_batch = next_forward_[virtual_stage];
        if (micro_batch == problem_.micro_batches) continue;
        const int slot = virtual_stage * problem_.micro_batches + micro_batch;
        const int index = reference_index(problem_, policy_.group, chunk, micro_batch);
        if (messages_.activation[slot] == kNever || !within_cap(state_[stage], stage, index)) continue;
        const double time = std::max(state_[stage].free, messages_.activation[slot]);
        if (time < best.time || (time == best.time && index < best_index)) {
            best = {time, problem_.code(kForward, chunk, micro_batch), urgency(kForward, slot)};
            best_index = index;
        }
    }
    return best;
}

Dispatcher::Choice Dispatcher::next_weight(int stage) const {
    const Stage& state = state_[stage];
    if (state.weights == static_cast<int>(weight_queue_[stage].size())) return {};
    const Code code = weight_queue_[stage][state.weights];
    const int virtual_stage = problem_.chunk_in(code) * problem_.stages + stage;
    const int slot = virtual_stage * problem_.micro_batches + problem_.micro_batch_in(code);
    return {state.free, code, urgency(kBackwardWeight, slot)};
}

Dispatcher::Choice Dispatcher::choose(int stage) const {
    const Choice candidates[] = {next_backward(stage), next_forward(stage),
                                 policy_.split ? next_weight(stage) : Choice{}};
    const double soonest = std::min({candidates[0].time, candidates[1].time, candidates[2].time});
    if (soonest == kNever) return {};
    Choice chosen;
    for (const Choice& candidate : candidates) {
        if (candidate.time > soonest) continue;
        if (chosen.time == kNever || candidate.urgency > chosen.urgency) chosen = candidate;
    }
    if (policy_.patience == 0.0 && policy_.target == kNever) return chosen;
    const int row = stage * problem_.chunks + problem_.chunk_in(chosen.code);
    if (policy_.target < kNever) {
        const double end = soonest + problem_.seconds(kind_of(chosen.code), row);
        Choice first = chosen;
        for (const Choice& candidate : candidates) {
            if (candidate.time == soonest || candidate.time >= end || candidate.urgency <= first.urgency) continue;
            const int crow = stage * problem_.chunks + problem_.chunk_in(candidate.code);
            const double lateness = end + candidate.urgency;
            if (lateness <= policy_.target) continue;
            const double waited = std::max(
                candidate.time + problem_.seconds(kind_of(candidate.code), crow) + chosen.urgency,
                candidate.time + state_[stage].work);
            if (waited < lateness) first = candidate;
        }
        return first;
    }
    const double deadline = soonest + policy_.patience * problem_.seconds(kind_of(chosen.code), row);
    for (const Choice& candidate : candidates) {
        if (candidate.time < deadline && candidate.urgency > chosen.urgency) chosen = candidate;
    }
    return chosen;
}

void Dispatcher::start_action(int stage, const Choice& choice) {
    Stage& state = state_[stage];
    const Kind kind = kind_of(choice.code);
    const int chunk = problem_.chunk_in(choice.code);
    const int micro_batch = problem_.micro_batch_in(choice.code);
    const int virtual_stage = chunk * problem_.stages + stage;
    orders_[stage].push_back(choice.code);
    start_[stage].push_back(choice.time);
    state.free = choice.time + problem_.seconds(kind, stage * problem_.chunks + chunk);
    end_[stage].push_back(state.free);
    state.work -= problem_.seconds(kind, stage * problem_.chunks + chunk);
    if (kind == kForward) {
        ++state.forwards;
        ++next_forward_[virtual_stage];
        state.highest = std::max(state.highest, reference_index(problem_, policy_.group, chunk, micro_batch));
    } else if (kind == kBackwardWeight) {
        ++state.weights;
    } else {
        ++state.inputs;
        ++next_backward_[virtual_stage];
        if (kind == kBackward) {
            ++state.weights;
        } else {
            weight_queue_[stage].push_back(problem_.code(kBackwardWeight, chunk, micro_batch));
        }
    }
    const int target = messages_.deliver(problem_, kind, virtual_stage, micro_batch, state.free);
    update(stage);
    if (target >= 0 && target != stage) update(target);
}

void Dispatcher::update(int stage) {
    choice_[stage] = choose(stage);
    for (int node = (leaves_ + stage) / 2; node > 0; node /= 2) {
        const int left = winner_[2 * node], right = winner_[2 * node + 1];
        winner_[node] = choice_[right].time < choice_[left].time ? right : left;
    }
}

}  // namespace adaptra
