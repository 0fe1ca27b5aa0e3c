// SPDX-License-Identifier: Apache-2.0
#include "routed_search.hpp"

#include <cmath>
#include <random>
#include <set>

#include "routed_dispatch.hpp"
#include "routed_replay.hpp"
#include "shares.hpp"

namespace adaptra {
namespace {

constexpr double kNoGain = 1e-9;
// More is moved only for this much less time: messages between replicas are not free where their costs are not known.
constexpr double kWorthMoving = 1e-3;
constexpr double kNoise[] = {0.0, 0.02, 0.1, 0.3};
constexpr int kRoutingsRefined = 4;

// Shares of the slack of a stage, between its balanced work and what the slowest stage leaves it, that a limit gives.
constexpr double kSlackShares[] = {1.0, 0.5, 0.0};
constexpr double kPhases[] = {0.0, 0.5, 0.999};
constexpr int kFewer[] = {0, 1};

// The first attained ReCycle's closed form in all trials with free memory. Where a slow cell sets the pace, backwards
// that run as soon as they can leave it idle at the end, waiting for the last one: 1F1B's order does not.
constexpr Manner kManners[] = {
    {3.0, false, false, true}, {0.0, false, true, true},     {1.0, false, false, true}, {1.0, false, true, true},
    {0.0, false, false, true}, {kNever, false, false, true}, {3.0, true, false, true},  {3.0, false, true, true},
};

class RoutedSearch {
public:
    RoutedSearch(const RoutedProblem& problem, bool split, double bound, std::int64_t budget)
        : problem_(problem), split_(split), bound_(bound), budget_(budget), dispatcher_(problem), replay_(problem) {}

    RoutedPlan run(const Hosts& present, double least_gain);

private:
    struct Candidate {
        Hosts hosts;
        int moved;
        double period = kNever;
    };

    bool spent() const { return plan_.simulated_actions >= budget_; }
    bool optimal(const RoutedResult& result) const { return result.period <= bound_ * (1.0 + kNoGain); }
    std::vector<Candidate> routings() const;
    std::vector<char> split_cells(bool split) const;
    std::vector<double> caps(const Hosts& hosts, double ahead) const;
    void rank(const Hosts& hosts, const Manner& manner, Urgency& priority) const;
    double dispatch(const Hosts& hosts, const Urgency& priority, const Manner& manner, RoutedResult& best);
    void try_manners(const Hosts& hosts, RoutedResult& best);
    bool disturb(Hosts& hosts);
    void improve(RoutedResult& best, bool may_move);

    const RoutedProblem& problem_;
    const bool split_;
    const double bound_;
    const std::int64_t budget_;
    RoutedDispatcher dispatcher_;
    RoutedReplay replay_;
    RoutedPlan plan_;
    std::mt19937 random_{1};
};

// Splitting needs room for what an input gradient adds.
std::vector<char> RoutedSearch::split_cells(bool split) const {
    std::vector<char> cells;
    for (int cell = 0; cell < problem_.cells(); ++cell) {
        cells.push_back(split && 1.0 + added_by_input(problem_.released[cell]) <= problem_.cap[cell] + kCapTolerance);
    }
    return cells;
}

// 1F1B holds as many as stages follow; a cell with more micro-batches than its own, in proportion more (ReCycle's poster
// and our own trials: the closed form is attained with 3 above that).
std::vector<double> RoutedSearch::caps(const Hosts& hosts, double ahead) const {
    std::vector<int> runs(problem_.cells(), 0);
    for (std::size_t slot = 0; slot < hosts.size(); ++slot) {
        ++runs[problem_.cell(hosts[slot], static_cast<int>(slot / problem_.jobs()))];
    }
    std::vector<double> caps(problem_.cap);
    for (int cell = 0; cell < problem_.cells() && ahead < kNever; ++cell) {
        const double stages_left = problem_.stages - problem_.stage_of(cell);
        const double streams = std::max(1.0, static_cast<double>(runs[cell]) / problem_.micro_batches);
        const double usual = std::ceil(stages_left * streams - kNoGain) + ahead + added_by_input(problem_.released[cell]);
        caps[cell] = std::min(caps[cell], usual);
    }
    return caps;
}

// Backwards before forwards before weight gradients, or forwards first; each by number, a cell's own first among equals,
// or all its own.
void RoutedSearch::rank(const Hosts& hosts, const Manner& manner, Urgency& priority) const {
    for (auto* table : {&priority.forward, &priority.backward, &priority.weight}) table->resize(problem_.slots());
    const double every = 2.0 * problem_.jobs();
    for (std::size_t slot = 0; slot < hosts.size(); ++slot) {
        const Job job = static_cast<Job>(slot % problem_.jobs());
        const int owner = problem_.owner(job), number = job % problem_.micro_batches;
        const int foreign = hosts[slot] != owner;
        const double place = manner.own_first ? (foreign * problem_.micro_batches + number) * problem_.replicas + owner
                                              : (number * 2.0 + foreign) * problem_.replicas + owner;
        priority.backward[slot] = 3.0 - place / every;
        priority.forward[slot] = (manner.forward_first ? 4.0 : 2.0) - place / every;
        priority.weight[slot] = 1.0 - place / every;
    }
}

double RoutedSearch::dispatch(const Hosts& hosts, const Urgency& priority, const Manner& manner, RoutedResult& best) {
    RoutedPolicy policy{&hosts, &priority, split_cells(manner.split), caps(hosts, manner.ahead)};
    const double period = dispatcher_.run(policy);
    plan_.simulated_actions += static_cast<std::int64_t>(problem_.slots()) * (manner.split ? 3 : 2);
    if (period < best.period * (1.0 - kNoGain)) {
        best = {period, hosts, dispatcher_.orders(), dispatcher_.start(), dispatcher_.end(), moved(problem_, hosts), manner};
    }
    return period;
}

void RoutedSearch::try_manners(const Hosts& hosts, RoutedResult& best) {
    Urgency priority;
    for (Manner manner : kManners) {
        rank(hosts, manner, priority);
        for (const bool split : {true, false}) {
            // Whole backwards are tried too where they may take less than their halves.
            if (split ? !split_ : split_ && !problem_.whole_given) continue;
            if (best.period < kNever && (spent() || optimal(best))) return;
            manner.split = split;
            dispatch(hosts, priority, manner, best);
        }
    }
}

// One or two micro-batches of a stage, or one in all stages, at another live cell; false: there is none.
bool RoutedSearch::disturb(Hosts& hosts) {
    const auto any = [&](int count) { return static_cast<int>(random_() % count); };
    const int stage = any(problem_.stages), replica = any(problem_.replicas);
    const Job job = any(problem_.jobs());
    const auto place = [&](int where, Job which, int host) {
        int& now = hosts[problem_.slot(where, which)];
        const bool changes = now != host && problem_.live[problem_.cell(host, where)] && !problem_.pinned[where];
        if (changes) now = host;
        return changes;
    };
    switch (any(3)) {
        case 0: return place(stage, job, replica);
        case 1: {
            const Job other = any(problem_.jobs());
            const int here = hosts[problem_.slot(stage, job)], there = hosts[problem_.slot(stage, other)];
            return place(stage, job, there) && place(stage, other, here);
        }
        default: {
            bool changed = false;
            for (int where = 0; where < problem_.stages; ++where) changed |= place(where, job, replica);
            return changed;
        }
    }
}

// Dispatches again by what remains after each action in the best orders (forward-backward improvement), with noise, and
// where hosts may change, with micro-batches elsewhere.
void RoutedSearch::improve(RoutedResult& best, bool may_move) {
    Urgency left;
    for (int round = 0; !spent() && !optimal(best); ++round) {
        Hosts hosts = best.hosts;
        Manner manner = best.manner;
        const bool elsewhere = may_move && round % 2 && problem_.replicas > 1;
        if (elsewhere) {
            for (int changes = 1 + static_cast<int>(random_() % 3); changes > 0; --changes) disturb(hosts);
        }
        if (elsewhere && random_() % 2) {
            rank(hosts, manner, left);
        } else {
            replay_.remaining(best.hosts, best.orders, left);
            const double noise = kNoise[random_() % std::size(kNoise)] * best.period;
            std::uniform_real_distribution<double> spread(-noise, noise);
            for (auto* table : {&left.forward, &left.backward, &left.weight}) {
                for (double& each : *table) each += noise > 0.0 ? spread(random_) : 0.0;
            }
            // Now and then the kinds keep their rank, and only micro-batches differ.
            if (random_() % 3 == 0) {
                for (double& each : left.backward) each += 4.0 * best.period;
                for (double& each : left.forward) each += 2.0 * best.period;
            }
            if (random_() % 2) manner.ahead = random_() % 2 ? kNever : manner.ahead + 1.0;
        }
        RoutedResult tried;
        dispatch(hosts, left, manner, tried);
        if (tried.period < best.period * (1.0 - (tried.moved > best.moved ? kWorthMoving : kNoGain))) {
            best = std::move(tried);
        }
    }
}

// Every share of a stage's slack that moves something else, the least moved first.
std::vector<RoutedSearch::Candidate> RoutedSearch::routings() const {
    std::vector<double> balanced;
    double slowest = 0.0;
    for (int stage = 0; stage < problem_.stages; ++stage) {
        balanced.push_back(balanced_work(problem_, stage));
        slowest = std::max(slowest, balanced.back());
    }
    slowest = std::max(slowest, problem_.staggered ? 0.0 : bound_);
    std::set<Hosts> known;
    std::vector<Candidate> found;
    const auto add = [&](Hosts hosts) {
        if (hosts.empty() || !known.insert(hosts).second) return;
        const int moves = moved(problem_, hosts);
        found.push_back({std::move(hosts), moves});
    };
    add(shared(problem_, {std::vector<double>(problem_.stages, kNever)}));
    for (const int fewer : kFewer) {
        for (const double phase : kPhases) {
            for (const double share : kSlackShares) {
                ShareRule rule{balanced, phase, fewer};
                for (double& limit : rule.limit) limit += share * (slowest - limit);
                add(shared(problem_, rule));
            }
        }
    }
    add(without_broken_replicas(problem_));
    std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.moved < b.moved; });
    return found;
}

RoutedPlan RoutedSearch::run(const Hosts& present, double least_gain) {
    RoutedResult kept;
    if (!present.empty()) try_manners(present, kept);
    plan_.present = kept.period;
    std::vector<Candidate> found = routings();
    Urgency priority;
    RoutedResult best;
    for (Candidate& candidate : found) {
        if (best.period < kNever && (spent() || optimal(best))) break;
        RoutedResult tried;
        Manner manner = kManners[0];
        manner.split = split_;
        rank(candidate.hosts, manner, priority);
        candidate.period = dispatch(candidate.hosts, priority, manner, tried);
        if (tried.period < best.period * (1.0 - (best.period < kNever ? kWorthMoving : 0.0))) best = std::move(tried);
    }
    std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.period < b.period; });
    for (std::size_t index = 0; index < std::min<std::size_t>(kRoutingsRefined, found.size()); ++index) {
        if (spent() || optimal(best)) break;
        RoutedResult tried;
        try_manners(found[index].hosts, tried);
        if (tried.period < best.period * (1.0 - (tried.moved > best.moved ? kWorthMoving : kNoGain))) best = std::move(tried);
    }
    plan_.kept = kept.period < kNever && best.period > kept.period * (1.0 - least_gain);
    plan_.best = plan_.kept ? std::move(kept) : std::move(best);
    improve(plan_.best, !plan_.kept);
    return std::move(plan_);
}

}  // namespace

RoutedPlan plan_routed(const RoutedProblem& problem, bool split, const Hosts& present, double least_gain, double bound,
                       std::int64_t budget) {
    return RoutedSearch(problem, split, bound, budget).run(present, least_gain);
}

}  // namespace adaptra
