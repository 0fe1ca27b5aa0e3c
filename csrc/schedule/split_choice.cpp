// SPDX-License-Identifier: Apache-2.0
#include "split_choice.hpp"

namespace adaptra {
namespace {

constexpr double kSame = 1e-11;             // relative: times that differ by less are equal but for rounding
constexpr std::int64_t kTrialPasses = 150;  // of a trial, in replays of the whole schedule: about its seeds
constexpr double kTrialShare = 0.5;         // of the budget, for all trials

// Splitting gains where messages are waited for, and costs what I and W take longer than B and what I adds to what is
// held. Trials are: all stages split, none, and then one stage after the other changed.
class SplitChoice {
public:
    SplitChoice(const Problem& problem, const std::vector<Orders>& known, const Goal& goal)
        : problem_(problem), known_(known), goal_(goal) {}

    SearchResult run();

private:
    bool attempt(const Split& split, std::int64_t budget);
    bool spent() const { return simulated_ >= kTrialShare * goal_.budget; }

    const Problem& problem_;
    const std::vector<Orders>& known_;
    const Goal goal_;
    std::int64_t simulated_ = 0;
    Split split_;
    SearchResult best_;
};

// What heads, tails and searches go by: the seconds of I and W, or of B where backwards are whole.
Problem as_run(Problem problem, const Split& split) {
    if (!problem.backward_differs) return problem;
    for (std::size_t entry = 0; entry < problem.forward.size(); ++entry) {
        if (split[entry / (problem.chunks * problem.width)]) continue;
        problem.backward_input[entry] = problem.backward[entry];
        problem.backward_weight[entry] = 0.0;
    }
    problem.backward_differs = false;  // or bounds would ease I and W of the others
    return problem;
}

SearchResult SplitChoice::run() {
    const Split most = most_split(problem_);
    const std::int64_t trial = kTrialPasses * actions_of(problem_, most);
    attempt(most, trial);
    attempt(Split(problem_.stages, false), trial);
    for (bool better = true; better && !spent();) {
        better = false;
        for (int stage = 0; stage < problem_.stages && !spent(); ++stage) {
            Split changed = split_;
            changed[stage] = most[stage] && !split_[stage];
            if (changed != split_) better |= attempt(changed, trial);
        }
    }
    attempt(split_, goal_.budget - simulated_);
    best_.simulated_actions = simulated_;
    return best_;
}

bool SplitChoice::attempt(const Split& split, std::int64_t budget) {
    const SearchResult found = search(as_run(problem_, split), split, known_, {goal_.bound, goal_.gap, budget});
    simulated_ += found.simulated_actions;
    if (!split_.empty() && found.makespan >= best_.makespan * (1.0 - kSame)) return false;
    best_ = found;
    split_ = split;
    return true;
}

// Whether whole backwards can gain anything. In a shared queue anything can: so no plan is slower than stock's order.
bool whole_may_help(const Problem& problem) {
    for (std::size_t row = 0; row < problem.backward.size(); ++row) {
        if (problem.backward[row] < problem.backward_input[row] + problem.backward_weight[row]) return true;
    }
    const auto adds = [](double released) { return released < 0.0; };
    return problem.launch_matters() || std::any_of(problem.released.begin(), problem.released.end(), adds);
}

}  // namespace

SearchResult search_any_split(const Problem& problem, bool may_split, const std::vector<Orders>& known,
                              const Goal& goal) {
    if (may_split && whole_may_help(problem)) return SplitChoice(problem, known, goal).run();
    const Split split(problem.stages, may_split);
    return search(as_run(problem, split), split, known, goal);
}

}  // namespace adaptra
