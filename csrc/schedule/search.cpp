// SPDX-License-Identifier: Apache-2.0
#include "search.hpp"

#include <cmath>
#include <optional>
#include <numeric>

#include "bounds.hpp"
#include "dispatch.hpp"
#include "launch.hpp"
#include "local_search.hpp"

namespace adaptra {
namespace {

constexpr double kSame = 1e-11;          // relative: times that differ by less are equal but for rounding
constexpr double kRoundShare = 0.1;      // of the budget that is left, per round of local search
constexpr int kHorizon = 4;              // of policies that expect messages
constexpr std::size_t kStarts = 3;       // different schedules that local search starts from
constexpr int kMemorySteps = 4;          // of bisection, for as fast a schedule that holds less
// What other work takes, in replays of the whole schedule.
constexpr std::int64_t kDispatchWeight = 8;
constexpr std::int64_t kLaunchWeight = 24;
constexpr std::int64_t kHeadsAndTailsWeight = 8;
constexpr std::int64_t kBoundWeight = 2 * kHeadsAndTailsWeight;  // with and without caps
// Where chunks have combined actions, a long search chooses the group.
constexpr std::int64_t kLong = 1000;  // least budget, in replays of the whole schedule
constexpr double kGroupsShare = 0.1;  // of the budget, at most, for comparing groups
constexpr double kMemoryShare = 0.2;  // of the budget, at most, for holding less

// Caps just above what hides the round trip from a stage to the last one and back, were it run at full speed.
struct Taper {
    double scale;
    double extra;
};

// 1F1B, or Megatron's interleaved 1F1B with groups of one micro-batch per stage, so that a plan is never worse than
// stock. With `delay_weights`, stage s runs W s backwards later: ZB-H1, which holds no more than stock's first stage.
// With `combined`, one more forward in the warm-up, and each later one runs as one with the backward behind it.
Orders stock_orders(const Problem& problem, const Split& split, bool delay_weights, bool combined) {
    const int total = problem.chunks * problem.micro_batches, group = problem.stages;
    std::vector<Code> forwards(total), backwards(total), inputs(total), weights(total);
    for (int micro_batch = 0; micro_batch < problem.micro_batches; ++micro_batch) {
        for (int chunk = 0; chunk < problem.chunks; ++chunk) {
            const int backward = reference_index(problem, group, problem.chunks - 1 - chunk, micro_batch);
            forwards[reference_index(problem, group, chunk, micro_batch)] = problem.code(kForward, chunk, micro_batch);
            backwards[backward] = problem.code(kBackward, chunk, micro_batch);
            inputs[backward] = problem.code(kBackwardInput, chunk, micro_batch);
            weights[backward] = problem.code(kBackwardWeight, chunk, micro_batch);
        }
    }
    Orders orders(problem.stages);
    for (int stage = 0; stage < problem.stages; ++stage) {
        const int later = problem.stages - 1 - stage;
        const int warm_up = (problem.chunks == 1 ? later : 2 * later + (problem.chunks - 1) * group) + combined;
        const int delay = delay_weights ? std::min(stage, total) : 0;
        Order& order = orders[stage];
        order.assign(forwards.begin(), forwards.begin() + std::min(warm_up, total));
        for (int index = 0; index < total; ++index) {
            if (warm_up + index < total) order.push_back(forwards[warm_up + index] | (combined ? kCombined : 0));
            order.push_back((split[stage] ? inputs : backwards)[index]);
            if (split[stage] && index >= delay) order.push_back(weights[index - delay]);
        }
        if (split[stage]) order.insert(order.end(), weights.end() - delay, weights.end());
    }
    return orders;
}

// The same orders with their backwards split or whole, as `split` says.
Orders with_backwards(const Orders& orders, const Split& split) {
    Orders changed(orders.size());
    for (std::size_t stage = 0; stage < orders.size(); ++stage) {
        for (const Code code : orders[stage]) {
            const Kind kind = kind_of(code);
            const Code action = code - kind;
            if (kind == kForward || (kind != kBackward && split[stage])) {
                changed[stage].push_back(code);
            } else if (sends_gradient(kind)) {
                changed[stage].push_back(action | (split[stage] ? kBackwardInput : kBackward));
                if (split[stage]) changed[stage].push_back(action | kBackwardWeight);
            }
        }
    }
    return changed;
}

// The makespan at which a search ends.
double enough(const Goal& goal) { return goal.bound * (1.0 + std::max(goal.gap, kSame)); }

struct Seed {
    double makespan;
    Orders orders;
};

class Search {
public:
    Search(const Problem& problem, const Split& split, const std::vector<Orders>& known, const Goal& goal, bool regroups)
        : problem_(problem), split_(split), known_(known), bound_(goal.bound),
          combines_(!problem.combined_saving.empty()), enough_(enough(goal)), budget_(goal.budget),
          regroups_(regroups),
          dispatcher_(problem), replay_(problem), group_(largest_group(problem, split)),
          actions_(actions_of(problem, split)),
          memory_steps_(static_cast<int>(
              std::min<std::int64_t>(kMemorySteps, kMemoryShare * goal.budget / (kDispatchWeight * actions_)))) {
        if (problem.launch_matters()) launch_.emplace(problem);
    }

    SearchResult run();

private:
    void seed();
    void seed_as_if_released(double share);
    int best_group();
    double makespan_of(const Orders& orders);
    void improve();
    bool local_round(LocalSearch& local);
    void redispatch();
    void save_memory();
    double attempt(Policy policy);
    void consider(const Orders& orders, double makespan);
    void remember(const Orders& orders, double makespan);
    bool within_caps(const Orders& orders) const;
    bool spent() const { return best_.simulated_actions >= budget_ - memory_steps_ * dispatch_actions(); }
    std::int64_t dispatch_actions() const { return kDispatchWeight * actions_; }
    double least_cap(int group, int stage) const { return room_needed(problem_, group, stage, split_[stage]); }
    bool good_enough() const { return best_.makespan <= enough_; }
    std::vector<double> tapered(const Taper& taper) const;
    Policy policy_with(const std::vector<double>& cap) const;
    Policy urgent_policy_with(const std::vector<double>& cap, double target, int horizon) const;

    const Problem& problem_;
    const Split split_;
    const std::vector<Orders>& known_;
    const double bound_;
    const bool combines_;
    const double enough_;
    const std::int64_t budget_;
    const bool regroups_;
    Dispatcher dispatcher_;
    Replay replay_;
    std::optional<Launch> launch_;  // where orders must be replayed as launched
    int group_;  // of policies, in micro-batches
    const std::int64_t actions_;
    const int memory_steps_;  // what is kept of the budget for them
    Urgency remaining_;  // of any schedule: a lower bound
    Urgency left_;       // of the best schedule
    Policy best_policy_;
    std::vector<Seed> seeds_;  // the best of different makespan, ascending
    double best_memory_ = kNever;
    SearchResult best_;
};

SearchResult Search::run() {
    if (group_ == 0) return best_;
    best_.simulated_actions = kBoundWeight * actions_;  // the caller's
    remaining_ = remaining_time(problem_);
    best_.simulated_actions += kHeadsAndTailsWeight * actions_;
    best_policy_ = policy_with(problem_.cap);
    seed();
    improve();
    save_memory();
    return best_;
}

Policy Search::policy_with(const std::vector<double>& cap) const {
    Policy policy;
    policy.split = split_;
    policy.cap = cap;
    policy.group = group_;
    policy.released = problem_.released;
    policy.paced = launch_.has_value();
    return policy;
}

Policy Search::urgent_policy_with(const std::vector<double>& cap, double target, int horizon) const {
    Policy policy = policy_with(cap);
    policy.urgency = &remaining_;
    policy.target = target;
    policy.horizon = horizon;
    return policy;
}

void Search::seed() {
    // Chosen on random cases: each of these wins where those before it do not.
    const std::vector<double>& full = problem_.cap;
    for (bool combined : {false, true}) {
        for (bool delay_weights : {false, true}) {
            if (combined && !combines_) continue;
            const Orders stock = stock_orders(problem_, split_, delay_weights, combined);
            if (!within_caps(stock)) continue;
            const double makespan = makespan_of(stock);
            if (combined && makespan < kNever) remember(stock, makespan);
            consider(stock, makespan);
        }
    }
    for (const Orders& known : known_) {
        const Orders orders = with_backwards(known, split_);
        if (!within_caps(orders)) continue;
        const double makespan = makespan_of(orders);
        remember(orders, makespan);
        consider(orders, makespan);
    }
    if (regroups_) group_ = best_group();
    const std::vector<double> tight = tapered({1.0, 1.0}), loose = tapered({1.5, 1.0});
    attempt(policy_with(full));
    attempt(urgent_policy_with(full, 0.0, 0));
    attempt(urgent_policy_with(full, bound_, kHorizon));
    attempt(urgent_policy_with(full, 0.0, kHorizon));
    attempt(urgent_policy_with(full, bound_, 0));
    attempt(policy_with(loose));
    attempt(urgent_policy_with(tight, bound_, kHorizon));
    attempt(urgent_policy_with(loose, 0.0, 0));
    attempt(urgent_policy_with(full, 1.01 * bound_, kHorizon));
    if (launch_) attempt(urgent_policy_with(tapered({0.6, 1.0}), 0.0, kHorizon));
    const bool capped = std::any_of(full.begin(), full.end(), [](double cap) { return cap < kNever; });
    const auto releases = [](double released) { return released > 0.0; };
    const bool any_split = *std::max_element(split_.begin(), split_.end());
    if (!capped || !any_split || std::none_of(problem_.released.begin(), problem_.released.end(), releases)) return;
    // As if input gradients released less: W then runs early enough that F rarely waits for one.
    for (double share : {0.0, 0.5}) seed_as_if_released(share);
}

void Search::seed_as_if_released(double share) {
    if (good_enough() || spent()) return;
    Problem strict = problem_;
    for (double& released : strict.released) released = std::min(released, share * released);
    const Urgency remaining = remaining_time(strict);
    const double bound = lower_bound(strict).seconds;
    best_.simulated_actions += (kHeadsAndTailsWeight + kBoundWeight) * actions_;
    for (double target : {bound, 1.01 * bound, 0.0}) {
        for (int horizon : {0, kHorizon}) {
            Policy policy = urgent_policy_with(problem_.cap, target, horizon);
            policy.urgency = &remaining;
            policy.released = strict.released;
            attempt(policy);
        }
    }
}

// Larger groups hide slow links, smaller ones leave room where caps are tight: one for each number of groups.
int Search::best_group() {
    int best = group_;
    double least = kNever;
    for (int groups = 1, last = 0; groups <= problem_.micro_batches; ++groups) {
        group_ = (problem_.micro_batches + groups - 1) / groups;
        if (group_ == last) continue;
        if (best_.simulated_actions > kGroupsShare * budget_) break;
        last = group_;
        const double makespan = attempt(policy_with(problem_.cap));
        if (makespan < least) {
            least = makespan;
            best = group_;
        }
    }
    return best;
}

// Returns the least makespan; kNever if nothing was dispatched.
double Search::attempt(Policy policy) {
    double least = kNever;
    // What combines nothing hides slow links best.
    for (const Pairing pairing : {Pairing::kNever, Pairing::kForeseen, Pairing::kPatient}) {
        if (pairing != Pairing::kNever && !combines_) continue;
        if (!seeds_.empty() && (good_enough() || spent())) return least;
        policy.pairing = pairing;
        if (dispatcher_.run(policy) == kNever) return least;
        // Replayed, the same orders may take less: the dispatcher idles when it waits for something more urgent.
        const double makespan = makespan_of(dispatcher_.orders());
        best_.simulated_actions += dispatch_actions();
        if (makespan <= best_.makespan * (1.0 + kSame)) best_policy_ = policy;
        remember(dispatcher_.orders(), makespan);
        consider(dispatcher_.orders(), makespan);
        least = std::min(least, makespan);
    }
    return least;
}

void Search::remember(const Orders& orders, double makespan) {
    const auto place = std::lower_bound(seeds_.begin(), seeds_.end(), makespan * (1.0 - kSame),
                                        [](const Seed& seed, double value) { return seed.makespan < value; });
    if (place != seeds_.end() && place->makespan <= makespan * (1.0 + kSame)) return;
    if (place - seeds_.begin() >= static_cast<std::ptrdiff_t>(kStarts)) return;
    seeds_.insert(place, {makespan, orders});
    if (seeds_.size() > kStarts) seeds_.pop_back();
}

void Search::consider(const Orders& orders, double makespan) {
    if (makespan == kNever || makespan > best_.makespan * (1.0 + kSame)) return;
    const std::vector<double> peaks = peaks_of(orders, problem_.released);
    const double memory = std::accumulate(peaks.begin(), peaks.end(), 0.0);
    if (makespan >= best_.makespan * (1.0 - kSame) && memory >= best_memory_) return;
    best_.makespan = makespan;
    best_memory_ = memory;
    best_.orders = orders;
}

double Search::makespan_of(const Orders& orders) {
    if (!launch_) return replay_.run(orders);
    best_.simulated_actions += kLaunchWeight * actions_;
    return launch_->run(orders);
}

// A round from each of the best seeds, then more rounds from the best schedule.
void Search::improve() {
    if (launch_) return;  // critical paths do not show which moves help there
    std::vector<LocalSearch> searches;
    for (const Seed& seed : seeds_) {
        if (good_enough() || spent()) return;
        searches.emplace_back(problem_, seed.orders);
        best_.simulated_actions += searches.back().simulated_actions();
    }
    for (LocalSearch& local : searches) {
        if (good_enough() || spent()) return;
        local_round(local);
    }
    while (!good_enough() && !spent()) {
        const auto better = [](const LocalSearch& a, const LocalSearch& b) { return a.makespan() < b.makespan(); };
        LocalSearch& local = *std::min_element(searches.begin(), searches.end(), better);
        if (!local_round(local)) continue;
        const double makespan = best_.makespan;
        redispatch();
        if (best_.makespan < makespan * (1.0 - kSame)) local = LocalSearch(problem_, best_.orders);
    }
}

bool Search::local_round(LocalSearch& local) {
    const std::int64_t before = local.simulated_actions();
    const double round = std::max(kRoundShare * (budget_ - best_.simulated_actions), 4.0 * actions_);
    const bool better = local.run(static_cast<std::int64_t>(round), enough_);
    best_.simulated_actions += local.simulated_actions() - before;
    consider(local.orders(), local.makespan());
    return better;
}

// Dispatches again with what really remains after each action in the best schedule.
void Search::redispatch() {
    const double makespan = best_.makespan;
    replay_.run(best_.orders);
    replay_.remaining(best_.orders, left_);
    for (double share : {0.0, 0.5, 0.9}) {
        Policy policy = urgent_policy_with(problem_.cap, bound_ + share * (makespan - bound_), kHorizon);
        policy.urgency = &left_;
        attempt(policy);
    }
}

// Bisects for the least share of the activations now held with which the best policy is still as fast.
void Search::save_memory() {
    const std::vector<double> peaks = peaks_of(best_.orders, problem_.released);
    if (best_policy_.urgency != nullptr) best_policy_.urgency = &remaining_;
    double enough = 1.0, too_little = 0.0;
    for (int step = 0; step < kMemorySteps && best_.simulated_actions + dispatch_actions() <= budget_; ++step) {
        const double share = 0.5 * (enough + too_little);
        for (int stage = 0; stage < problem_.stages; ++stage) {
            const double wanted = std::max(least_cap(best_policy_.group, stage), std::ceil(share * peaks[stage]));
            best_policy_.cap[stage] = std::min(problem_.cap[stage], wanted);
        }
        dispatcher_.run(best_policy_);
        best_.simulated_actions += dispatch_actions();
        const double makespan = makespan_of(dispatcher_.orders());
        consider(dispatcher_.orders(), makespan);
        (makespan <= best_.makespan * (1.0 + kSame) ? enough : too_little) = share;
    }
}

std::vector<double> Search::tapered(const Taper& taper) const {
    double period = 0.0;
    for (int stage = 0; stage < problem_.stages; ++stage) {
        double work = 0.0;
        for (int row = stage * problem_.chunks; row < (stage + 1) * problem_.chunks; ++row) {
            work += problem_.mean_seconds(kForward, row) + problem_.mean_seconds(kBackward, row);
        }
        period = std::max(period, work);
    }
    std::vector<double> cap = problem_.cap;
    double round_trip = 0.0;
    std::vector<double> wanted(problem_.stages, taper.extra);
    for (int v = problem_.virtual_stages() - 1; v >= 0; --v) {
        const int row = problem_.row(v), stage = problem_.stage_of(v);
        if (v + 1 < problem_.virtual_stages()) {
            round_trip += problem_.transfer(problem_.activation_link[v]);
            round_trip += problem_.transfer(problem_.gradient_link[v + 1]);
        }
        round_trip += problem_.mean_seconds(kForward, row) + problem_.mean_seconds(kBackwardInput, row);
        wanted[stage] += period > 0.0 ? taper.scale * round_trip / period : 0.0;
    }
    for (int stage = 0; stage < problem_.stages; ++stage) {
        cap[stage] = std::min(cap[stage], std::max(least_cap(group_, stage), std::ceil(wanted[stage])));
    }
    return cap;
}

bool Search::within_caps(const Orders& orders) const {
    const std::vector<double> peaks = peaks_of(orders, problem_.released);
    return std::equal(peaks.begin(), peaks.end(), problem_.cap.begin(),
                      [](double peak, double cap) { return peak <= cap + kCapTolerance; });
}

}  // namespace

SearchResult search(const Problem& problem, const Split& split, const std::vector<Orders>& known, const Goal& goal) {
    const bool is_long = goal.budget >= kLong * actions_of(problem, split);
    const bool regroups = is_long && problem.chunks > 1 && !problem.combined_saving.empty();
    return Search(problem, split, known, goal, regroups).run();
}

}  // namespace adaptra
