// SPDX-License-Identifier: Apache-2.0
//
// Runs every registered test, or those whose names contain the argument. Exit status 0 when all
// passed, 1 otherwise; SIGALRM ends the program when one of them hangs.
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <exception>
#include <utility>

#include "harness.h"

namespace testing {
namespace {

constexpr unsigned kLimitSecs = 900;  // of one test; the longest takes seconds
std::atomic<int> failures{0};

}  // namespace

std::vector<Test>& tests()
{
    static std::vector<Test> all;
    return all;
}

void fail(const char* file, int line, const std::string& what)
{
    ++failures;
    std::fprintf(stderr, "%s:%d: failed: %s\n", file, line, what.c_str());
}

int num_failures()
{
    return failures;
}

}  // namespace testing

int main(int argc, char** argv)
{
    const std::string wanted = argc > 1 ? argv[1] : "";
    int num_run = 0;
    for (const testing::Test& test : testing::tests()) {
        if (test.name.find(wanted) == std::string::npos) {
            continue;
        }
        alarm(testing::kLimitSecs);
        std::printf("%s\n", test.name.c_str());
        std::fflush(stdout);
        ++num_run;
        try {
            test.body();
        } catch (const std::exception& error) {
            testing::fail(test.name.c_str(), 0, std::string("left by exception: ") + error.what());
        }
    }
    std::printf("%d tests run, %d checks failed\n", num_run, testing::num_failures());
    return num_run > 0 && testing::num_failures() == 0 ? 0 : 1;
}
