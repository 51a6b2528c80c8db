// SPDX-License-Identifier: Apache-2.0
//
// A test program in one header: TEST defines and registers a test, CHECK records a failure and goes
// on, CHECK_THROWS wants an exception of that type.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace testing {

struct Test {
    std::string name;
    std::function<void()> body;
};

std::vector<Test>& tests();
void fail(const char* file, int line, const std::string& what);
int num_failures();

struct Registration {
    Registration(const char* name, std::function<void()> body)
    {
        tests().push_back({name, std::move(body)});
    }
};

}  // namespace testing

#define TEST(name)                                             \
    static void name();                                        \
    static testing::Registration register_##name(#name, name); \
    static void name()

#define CHECK(condition)                                   \
    do {                                                   \
        if (!(condition)) {                                \
            testing::fail(__FILE__, __LINE__, #condition); \
        }                                                  \
    } while (false)

#define CHECK_THROWS(type, statement)                                           \
    do {                                                                        \
        bool has_thrown = false;                                                \
        try {                                                                   \
            statement;                                                          \
        } catch (const type&) {                                                 \
            has_thrown = true;                                                  \
        }                                                                       \
        if (!has_thrown) {                                                      \
            testing::fail(__FILE__, __LINE__, #statement " must throw " #type); \
        }                                                                       \
    } while (false)
